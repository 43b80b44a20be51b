"""Steps of both composable forms over machines, and the same steps of one device. Ranks are made by `machine_ranks`.

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

from dataparallel.composable import replicate
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


REPLICATED = {"replicate": 2, "replicate on three": 3}
"""For each way to replicate the number of machines."""


def ranks_of(way: str) -> int:
    """The number of machines of a way to spread or to replicate."""
    return REPLICATED[way] if way in REPLICATED else SPREADS[way][0]


def slots_of(way: str) -> int:
    """How many devices each of these machines has, so that there are not too many."""
    return 1 if ranks_of(way) > 2 else 2


def over(way: str, model: Any, devices: Sequence[Any], **options: Any) -> Any:
    """The model over machines, in a rank: replicated in small buckets, or spread in units."""
    if way not in REPLICATED:
        return sharded(model, devices, **spread(way), **options)
    buckets = {"first_bucket_mb": 64 / 2**20, "bucket_cap_mb": 600 / 2**20}
    return replicate(model, devices=devices, process_group=distributed.group.WORLD, **buckets, **options)


def spread(way: str) -> dict[str, Any]:
    """The arguments of `fully_shard` for one of `SPREADS`, in a rank."""
    _, shape = SPREADS[way]
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
        options: of the form.
        way: another one than that of the test.
    """

    model: str = "gpt"
    loop: str = "one_backward"
    steps: int = 5
    options: dict[str, Any] = field(default_factory=dict)
    way: str | None = None


def trained_on_rank(rank: int, devices: list[Any], way: str, runs: Sequence[Run]) -> list[Trained]:
    """The steps of one machine. It returns the whole values."""
    ranks = distributed.get_world_size()
    found = []
    for run in runs:
        module = over(run.way or way, on_device(MODELS[run.model].build, devices[0]), devices, **run.options)
        own = batches_of_rank(run.model, rank, ranks, devices[0])
        found.append(train(module, own, steps=run.steps, loop=LOOPS[run.loop], loss=sum_of_squares))
        found[-1].losses = []
    return found


def assert_train_as_one(way: str, runs: Sequence[Run], slots: int | None = None) -> None:
    """Asserts that each run over machines ends as on one device, and has the same gradients after each step."""
    ranks = ranks_of(way)
    by_rank = on_machines(trained_on_rank, way, list(runs), ranks=ranks, slots=slots or slots_of(way))
    for number, run in enumerate(runs):
        expected = trained_on_one(run.model, ranks, run.loop, run.steps)
        for found in by_rank:
            assert_same(found[number], expected, losses=False)
