"""A user's program with the types that a checker finds in it. ``.ci/run`` has mypy and pyright check it."""

# pyright: strict, reportUnknownMemberType=false

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import dataparallel
from dataparallel import DataParallel, PerReplica, comm, peers
from dataparallel.composable import (
    FullyShardedModule,
    GradBucket,
    ReplicatedModule,
    fully_shard,
    register_forward_method,
    replicate,
)
from dataparallel.sharded import ShardedTensor, distribute_tensor


class Net(nn.Module):
    """Normalises by a mean over the whole batch."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(3, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        total, (first, second) = peers.all_reduce(y.sum(0)), peers.all_gather((y, y))
        assert_type(total, Tensor)
        assert_type(first, Tensor)
        assert_type(peers.index(), int)
        return y - total / len(first) + 0 * second.mean()

    def encode(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.linear(x)
        return encoded


SLOTS = ["cpu", "cpu"]
x, targets = torch.randn(8, 3), torch.randn(8, 4)


def wrapper() -> None:
    model = DataParallel(Net(), SLOTS, output_device="cpu", workers=1, chunk_sizes=[0.5, 1])
    assert_type(model, DataParallel[Net])
    assert_type(model.module, Net)
    assert_type(model.module.width, int)
    assert_type(model.device_ids, list[int | torch.device])
    assert_type(model.dim, int)
    output: Tensor = model(x)
    output.sum().backward()
    model.options.chunk_sizes = [1.0, 3.0]
    model.options.serial = True
    with torch.inference_mode(), model.options.frozen():
        model(x)
    loss: Tensor = DataParallel(Net(), SLOTS, scalars="mean")(x).sum()
    loss.backward()


def batches() -> None:
    model = DataParallel(Net(), SLOTS)
    pairs = [(x, "first"), (x, "second")]
    for inputs, name in dataparallel.prefetch(pairs, model, depth=2):
        assert_type(inputs, Tensor)
        assert_type(name, str)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(TensorDataset(x, targets), batch_size=4)
    assert len(dataparallel.prefetch(loader, model)) == 2
    assert_type(dataparallel.whole(x), Tensor)
    assert_type(dataparallel.samples([{"boxes": x}])[0], dict[str, Tensor])
    states = PerReplica(["first", "second"])
    assert_type(states, PerReplica[str])
    assert_type(states[0], str)


def composable() -> None:
    model = replicate(Net(), devices=SLOTS, bucket_cap_mb=1.0)
    assert_type(model, Net)
    assert_type(model.encode(x), Tensor)
    register_forward_method(model, "encode")
    # No type says "a Net that has these methods too", but both classes are the model's.
    assert isinstance(model, ReplicatedModule)
    with model.no_sync():
        model(x).sum().backward()
    model.set_requires_gradient_sync(True)
    assert_type(model.width, int)

    def hook(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        assert_type(bucket.buffer(), Tensor)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)


def sharded() -> None:
    model = nn.Sequential(Net(), nn.Linear(4, 4))
    for block in model:
        assert_type(fully_shard(block, devices=SLOTS), nn.Module)
    model = fully_shard(model, devices=SLOTS, reshard_after_forward=False)
    assert_type(model, nn.Sequential)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    state, of_optimizer = fully_shard.full_state_dict(model, optimizer)
    fully_shard.load_full_state_dict(model, (state, of_optimizer), optimizer)
    assert isinstance(model, FullyShardedModule)
    model.set_reshard_after_forward(True)
    handle = model.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    tensor = distribute_tensor(x, SLOTS)
    assert_type(tensor, ShardedTensor)
    assert_type(tensor.full_tensor(), Tensor)
    assert_type(tensor.devices, tuple[torch.device, ...])


def tools() -> None:
    model = DataParallel(Net(), SLOTS)
    replicas = dataparallel.replicate(model.module, SLOTS)
    assert_type(replicas, list[Net])
    copies = comm.broadcast(x, SLOTS)
    assert_type(copies, tuple[Tensor, ...])
    assert_type(comm.reduce_add(copies), Tensor)
    with comm.using(transport="host"):
        comm.gather(copies)


if __name__ == "__main__":
    for part in (wrapper, batches, composable, sharded, tools):
        part()
