"""Trains a small network on two machines, each of which has two slots on the CPU.

Two processes on one machine act as two machines:

    torchrun --nnodes=1 --nproc-per-node=2 train_on_machines.py

On two real ones there is one process on each. Run this on both of them, with --node-rank=1 on the second:

    torchrun --nnodes=2 --node-rank=0 --master-addr=ADDRESS --nproc-per-node=1 train_on_machines.py

ADDRESS is that of the first machine. Kill it at any time and run it again: it goes on after the last epoch that it has
saved, and ends with the same bits.
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
    distributed.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank = distributed.get_rank()
    x = torch.randn(2048, 20, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data)  # each machine gets its own samples
    loader = DataLoader(data, batch_size=64, sampler=sampler)  # 64 for a machine, 32 for a slot

    torch.manual_seed(0)  # a new run begins with the same weights; they are sent from rank 0 to all
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 1))
    replicate(model, devices=["cpu", "cpu"], process_group=distributed.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first_epoch = load(model, optimizer)

    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch
        torch.manual_seed(1000 * epoch + rank)  # dropout: a run that begins at this epoch draws the same
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            save(model, optimizer, epoch)
            print(f"epoch {epoch} saved, loss {loss.item():.4f}", flush=True)
    distributed.destroy_process_group()


def load(model, optimizer):
    """Loads the last checkpoint, which rank 0 reads and sends to all. Returns the epoch to begin at."""
    found = [None]
    if distributed.get_rank() == 0 and CHECKPOINT.exists():
        found = [torch.load(CHECKPOINT)]
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
