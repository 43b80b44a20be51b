"""`replicate` over machines, with replicas that are captured as graphs: steps are those of one device."""

from typing import Any

import pytest
from torch import distributed

from graphed_nets import captured
from machine_ranks import on_machines
from sharded_machines import batches_of_rank, over, ranks_of, slots_of, sum_of_squares, trained_on_one
from sharded_steps import LOOPS, MODELS, Trained, assert_same, on_device, train

pytestmark = pytest.mark.devices("cuda")

MODEL, WAY, STEPS = "gpt", "replicate", 20


def trained_with_graphs(rank: int, devices: list[Any]) -> tuple[Trained, int]:
    """The whole values, and the launches of this machine."""
    module = over(WAY, on_device(MODELS[MODEL].build, devices[0]), devices, graphs=True)
    own = batches_of_rank(MODEL, rank, distributed.get_world_size(), devices[0])
    found = train(module, own, steps=STEPS, loop=LOOPS["one_backward"], loss=sum_of_squares)
    return found, captured(module)


def test_steps_are_those_of_one_device() -> None:
    found = on_machines(trained_with_graphs, ranks=ranks_of(WAY), slots=slots_of(WAY))
    expected = trained_on_one(MODEL, ranks_of(WAY), steps=STEPS)
    for trained, launches in found:
        assert_same(trained, expected, losses=False)
        assert launches > STEPS // 2
