"""Steps of `fully_shard` over machines, and the same steps of one device. Ranks are made by `machine_ranks`.

Each machine computes with its part of a batch. The loss of a machine is a sum over its samples, and gradients are
averaged over machines: so the loss of one device is the sum over all samples, divided by the number of machines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

from dataparallel.testing.cases import Batch
from machine_ranks import on_machines
from selection import others_long
from sharded_steps import LOOPS, MODELS, Trained, assert_same, moved, on_device, sharded, train

SIZES = [[2, 3, 1, 4], [1, 2, 2, 1], [3, 1, 2, 5], [2, 2, 2, 2]]
"""Samples of each of up to four machines, for one batch after another."""

SCALE = 500
"""Divides losses, so that gradients that are rounding alone stay small beside the epsilon of AdamW."""

SPREADS = {
    "hybrid": (2, None),
    "1-D": (2, (2,)),
    "2-D, one of each": (2, (2, 1)),
    "2-D": (4, (2, 2)),
}
"""For each way the number of machines, and the shape of the mesh; a group without one."""

EACH_SPREAD = pytest.mark.parametrize("way", others_long(SPREADS, ["hybrid", "1-D"]))
"""Runs a test with each way; meshes of two dimensions only in long runs."""


def spread(name: str) -> dict[str, Any]:
    """The arguments of `fully_shard` for one of `SPREADS`, in a rank."""
    _, shape = SPREADS[name]
    if shape is None:
        return {"process_group": distributed.group.WORLD}
    return {"mesh": init_device_mesh("cpu", shape)}


def sizes(number: int, ranks: int) -> list[int]:
    """How many samples each machine has of a batch."""
    return SIZES[number % len(SIZES)][:ranks]


def batches(model: str, ranks: int) -> Iterator[Batch]:
    """Whole batches, without end."""
    for number in itertools.count():
        yield MODELS[model].batch(sum(sizes(number, ranks)), number)


def batches_of_rank(model: str, rank: int, ranks: int, device: Any) -> Iterator[Batch]:
    """What one machine has of `batches`."""
    for number, batch in enumerate(batches(model, ranks)):
        split = sizes(number, ranks)

        def part(leaf: Any, split: list[int] = split) -> Any:
            return leaf.split(split)[rank] if isinstance(leaf, Tensor) else leaf

        yield moved(tree_map(part, batch), device)


def sum_of_squares(output: Any) -> Tensor:
    return output.square().sum() / SCALE


def mean_of(ranks: int) -> Callable[[Any], Tensor]:
    """The loss of one device."""
    return lambda output: sum_of_squares(output) / ranks


def trained_on_one(model: str, ranks: int, loop: str = "one_backward", steps: int = 5) -> Trained:
    """The same steps on one device."""
    module = on_device(MODELS[model].build, "cpu")
    return train(module, batches(model, ranks), steps=steps, loop=LOOPS[loop], loss=mean_of(ranks))


@dataclass
class Run:
    """Some steps.

    Attributes:
        model: of `MODELS`.
        loop: of `LOOPS`.
        options: of `fully_shard`.
    """

    model: str = "gpt"
    loop: str = "one_backward"
    steps: int = 5
    options: dict[str, Any] = field(default_factory=dict)


def trained_on_rank(rank: int, devices: list[Any], way: str, runs: Sequence[Run]) -> list[Trained]:
    """The steps of one machine. It returns the whole values."""
    where = spread(way)
    ranks = distributed.get_world_size()
    found = []
    for run in runs:
        module: Any = sharded(on_device(MODELS[run.model].build, devices[0]), devices, **where, **run.options)
        own = batches_of_rank(run.model, rank, ranks, devices[0])
        found.append(train(module, own, steps=run.steps, loop=LOOPS[run.loop], loss=sum_of_squares))
        found[-1].losses = []
    return found


def assert_train_as_one(way: str, runs: Sequence[Run], slots: int = 2) -> None:
    """Asserts that each run over machines ends as on one device, and has the same gradients after each step."""
    ranks, _ = SPREADS[way]
    by_rank = on_machines(trained_on_rank, way, list(runs), ranks=ranks, slots=slots)
    for number, run in enumerate(runs):
        expected = trained_on_one(run.model, ranks, run.loop, run.steps)
        for found in by_rank:
            assert_same(found[number], expected, losses=False)
