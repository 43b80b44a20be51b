"""What tests of collectives across machines share: functions of a replica, and a model that spans machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from dataparallel import DataParallel, peers
from dataparallel.composable import fully_shard, replicate
from peer_calls import Calls, samples

FORMS = {"replicate": replicate, "fully_shard": fully_shard}


def _reduced(op: Any) -> Callable[..., Tensor]:
    def function(chunk: Tensor, weight: Tensor, **across: bool) -> Tensor:
        found = peers.all_reduce({"a": (chunk * weight).sum(0), "b": chunk.new_full((2, 2), len(chunk))}, op, **across)
        return chunk * found["a"] + found["b"].sum()

    return function


def all_gather(chunk: Tensor, weight: Tensor, **across: bool) -> Tensor:
    """Uneven chunks, and integers beside them that need no gradients."""
    found, sizes = peers.all_gather((chunk * weight, torch.tensor([len(chunk)], device=chunk.device)), **across)
    first = int(sizes[: peers.index(**across)].sum())
    assert torch.equal(found[first : first + len(chunk)], chunk * weight)
    return chunk @ found.square().T @ found


def all_gather_columns(chunk: Tensor, weight: Tensor, **across: bool) -> Tensor:
    """Along the last dimension."""
    return chunk * peers.all_gather((chunk[:1] * weight), dim=-1, **across).square().sum()


def broadcast(chunk: Tensor, weight: Tensor, **across: bool) -> Tensor:
    """From the last replica."""
    return chunk * peers.broadcast(chunk[0] * weight, peers.count(**across) - 1, **across)


def reduce_scatter(chunk: Tensor, weight: Tensor, **across: bool) -> Tensor:
    """Near-equal chunks, and given ones of which one is empty."""
    count = peers.count(**across)
    even = peers.reduce_scatter(torch.outer(torch.arange(2 * count + 1).to(chunk), chunk[0] * weight), **across)
    sizes = [2 * at for at in range(count)]
    given = peers.reduce_scatter(torch.outer(torch.arange(sum(sizes)).to(chunk), chunk[-1] * weight), sizes, **across)
    return chunk * (even.sum() + given.square().sum())


def large(chunk: Tensor, weight: Tensor, **across: bool) -> Tensor:
    """More than 64 KiB, of which each machine adds up a part."""
    return chunk * peers.all_reduce((chunk * weight).sum(0).repeat(3001), **across).sum()


def barrier(chunk: Tensor, weight: Tensor, **across: bool) -> Tensor:
    """Nothing but a meeting."""
    peers.barrier(**across)
    return chunk * weight


def checkpointed(chunk: Tensor, weight: Tensor, **across: bool) -> Tensor:
    """Recomputed in backward, where nobody can be met."""
    return peers.checkpoint(all_gather, chunk, weight, **across) + peers.index(**across)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{f"all_reduce {op}": _reduced(op) for op in ("sum", "mean", "max", "min", "prod")},
    **{each.__name__: each for each in (all_gather, all_gather_columns, broadcast, reduce_scatter)},
    **{each.__name__: each for each in (large, barrier, checkpointed)},
}


class Across(nn.Module):
    """``forward(chunk)`` is a function of the table, across machines."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3, dtype=torch.float64))

    def forward(self, chunk: Tensor) -> Tensor:
        return FUNCTIONS[self.name](chunk, self.weight, across_machines=True)


def spanning(module: nn.Module, devices: Sequence[torch.device], form: str = "replicate", **options: Any) -> Any:
    """The module in a form over the default group, or over ``mesh``."""
    if "mesh" not in options:
        options.setdefault("process_group", distributed.group.WORLD)
    return FORMS[form](module.to(devices[0]), devices=devices, **options)


def grad_of(parameter: Tensor) -> Tensor:
    """The whole gradient, on the CPU."""
    found: Any = parameter.grad
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).cpu()


def whole_batch(rows: Sequence[int]) -> tuple[Tensor, list[slice]]:
    """The samples of all machines, and the rows of each."""
    firsts = [sum(rows[:rank]) for rank in range(len(rows))]
    return samples(sum(rows)), [slice(first, first + own) for first, own in zip(firsts, rows, strict=True)]


def as_one_call(
    rank: int,
    devices: list[torch.device],
    names: Sequence[str],
    form: str,
    chunks: Sequence[Sequence[int]],
    mesh: tuple[int, int] | None = None,
) -> int:
    """Compares outputs and gradients with those of one machine whose slots are all replicas; returns how many calls.

    ``chunks``: for each machine its chunk sizes, with fewer chunks than slots for a small batch.
    """
    options: dict[str, Any] = {}
    if len(chunks[rank]) == len(devices):
        options["chunk_sizes"] = list(chunks[rank])
    if mesh is not None:
        from torch.distributed.device_mesh import init_device_mesh

        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    batch, rows = whole_batch([sum(own) for own in chunks])
    sizes = [size for own in chunks for size in own]
    scale = torch.linspace(1, 2, len(batch), dtype=torch.float64)[:, None]
    for name in names:
        function = FUNCTIONS[name]
        one = DataParallel(Calls(function), [torch.device("cpu")] * len(sizes), chunk_sizes=sizes)
        given = batch.clone().requires_grad_()
        expected = one(given)
        (expected * scale).sum().backward()
        model = spanning(Across(name), devices, form, **options)
        mine = batch[rows[rank]].to(devices[0]).requires_grad_()
        for _ in range(2):  # the second forward takes the short ways
            model.zero_grad()
            mine.grad = None
            found = model(mine)
            torch.testing.assert_close(found.cpu(), expected[rows[rank]], rtol=1e-9, atol=1e-9)
            (found * scale[rows[rank]].to(found)).sum().backward()
            assert given.grad is not None
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.cpu(), given.grad[rows[rank]], rtol=1e-9, atol=1e-9)
            mean = grad_of(model.weight) * len(chunks)
            torch.testing.assert_close(mean, one.module.weight.grad, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            torch.testing.assert_close(model(mine).cpu(), expected[rows[rank]], rtol=1e-9, atol=1e-9)
    return len(names)
