"""Units without modules, for the tests of the runtime of units."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Shard, distribute_tensor
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.buffers import Precision
from dataparallel.sharded.units.shards import PullSource
from dataparallel.sharded.units.unit import Unit


def values(count: int = 2, rows: int = 6, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Parameters with distinct values, on the CPU."""
    return [torch.arange(2 * rows * i, 2 * rows * (i + 1)).to(dtype).view(rows, 2) for i in range(count)]


def parameters(tensors: Sequence[Tensor], slots: Sequence[Any], is_offloaded: bool = False) -> list[ShardedTensor]:
    """Sharded parameters with these values; their shards are in host memory if they are offloaded."""
    found: list[Any] = []
    for tensor in tensors:
        made = distribute_tensor(tensor, ["cpu"] * len(slots) if is_offloaded else slots, Shard(0))
        owned = ShardedTensor(made.shards, made.placement, made.shape, devices=[*map(torch.device, slots)])
        found.append(nn.Parameter(owned))
    return found


def unit_of(
    tensors: Sequence[Tensor],
    slots: Sequence[Any],
    precision: Precision | None = None,
    *,
    is_offloaded: bool = False,
) -> Unit:
    """A unit that is ready for a call. What is offloaded is pinned."""
    made = Unit(
        "made",
        parameters(tensors, slots, is_offloaded),
        [torch.device(slot) for slot in slots],
        precision or Precision(),
        is_offloaded=is_offloaded,
        pin=is_offloaded,
    )
    made.refresh()
    return made


def in_backward(*works: Callable[[], Any]) -> None:
    """Runs a backward that calls these in its nodes, one after the other."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        for work in reversed(works):
            x = x * 1
            x.register_hook(lambda grad, work=work: work() and None)
        x.sum().backward()


class Registry:
    """In place of a replica: what is registered there."""

    def __init__(self) -> None:
        self.registered: list[Tensor] = []

    def register(self, parameters: Sequence[Tensor]) -> None:
        self.registered = [*parameters]


def recorded_gathers(monkeypatch: pytest.MonkeyPatch) -> list[PullSource]:
    """A list that gets the sources which slots ask for the owners' shards, one for each gather of a slot."""
    asked: list[PullSource] = []
    of_source = PullSource.pieces

    def recorded(self: PullSource, *args: Any) -> Any:
        asked.append(self)
        return of_source(self, *args)

    monkeypatch.setattr(PullSource, "pieces", recorded)
    return asked
