"""Trains a small network on two machines, with one process on each. Two processes on one machine stand for two.

    torchrun --nproc-per-node=2 examples/two_machines.py

On two real machines run this on both of them, with --node-rank=1 on the second. ADDRESS is that of the first:

    torchrun --nnodes=2 --node-rank=0 --master-addr=ADDRESS --nproc-per-node=1 examples/two_machines.py

Kill it at any time and run it again: it goes on after the last epoch that it has saved, and ends with the same bits.
Each process takes its share of the accelerators; without any, two slots on the CPU.
"""

import os
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dataparallel.composable import replicate

EPOCHS = 8
CHECKPOINT = Path("checkpoint.pt")


def main():
    """Trains until the last epoch, from the first one or from the one after the last checkpoint."""
    distributed.init_process_group("gloo", timeout=timedelta(minutes=1))  # with GPUs: "cpu:gloo,cuda:nccl" is faster
    rank = distributed.get_rank()
    slots = slots_of_this_process()
    device = torch.device(slots[0])
    x = torch.randn(2048, 20, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data)  # each machine gets its own samples
    loader = DataLoader(data, batch_size=64, sampler=sampler)  # 64 for a machine, 32 for a slot

    torch.manual_seed(0)  # a new run begins with the same weights; they are sent from rank 0 to all
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 1)).to(device)
    replicate(model, devices=slots, process_group=distributed.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first_epoch = load(model, optimizer)

    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch
        torch.manual_seed(1000 * epoch + rank)  # dropout: a run that begins at this epoch draws the same
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            save(model, optimizer, epoch)
            print(f"epoch {epoch} saved, loss {loss.item():.4f}", flush=True)
    distributed.destroy_process_group()


def slots_of_this_process():
    """Processes on one machine share its accelerators. On real machines there is one, and it takes all."""
    count = torch.accelerator.device_count() // int(os.environ["LOCAL_WORLD_SIZE"])
    first = count * int(os.environ["LOCAL_RANK"])
    return list(range(first, first + count)) or ["cpu", "cpu"]


def load(model, optimizer):
    """Loads the last checkpoint, which rank 0 reads and sends to all. Returns the epoch to begin at."""
    found = [None]
    if distributed.get_rank() == 0 and CHECKPOINT.exists():
        found = [torch.load(CHECKPOINT, map_location="cpu")]
    distributed.broadcast_object_list(found)
    if found[0] is None:
        return 0
    model.load_state_dict(found[0]["model"])
    optimizer.load_state_dict(found[0]["optimizer"])
    return found[0]["epoch"] + 1


def save(model, optimizer, epoch):
    """Writes another file first, so that a kill leaves the last checkpoint whole."""
    written = CHECKPOINT.with_suffix(".new")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, written)
    os.replace(written, CHECKPOINT)


if __name__ == "__main__":
    main()
