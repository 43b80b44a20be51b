"""Both forms over machines, with replicas and units that are captured as graphs: steps are those of one device."""

from typing import Any

import pytest
from torch import distributed

from graphed_nets import captured
from machine_ranks import on_machines
from sharded_machines import batches_of_rank, over, ranks_of, slots_of, sum_of_squares, trained_on_one
from sharded_steps import LOOPS, MODELS, Trained, assert_same, on_device, train

pytestmark = pytest.mark.devices("cuda")

MODEL, STEPS = "gpt", 20


def trained_with_graphs(rank: int, devices: list[Any], way: str) -> tuple[Trained, dict[str, int]]:
    """The whole values, and the launches of this machine by name of a module."""
    module = over(way, on_device(MODELS[MODEL].build, devices[0]), devices, graphs=True)
    own = batches_of_rank(MODEL, rank, distributed.get_world_size(), devices[0])
    found = train(module, own, steps=STEPS, loop=LOOPS["one_backward"], loss=sum_of_squares)
    return found, captured(module)


@pytest.mark.parametrize("way", ["replicate", "hybrid", "1-D"])
def test_steps_are_those_of_one_device(way: str) -> None:
    found = on_machines(trained_with_graphs, way, ranks=ranks_of(way), slots=slots_of(way))
    expected = trained_on_one(MODEL, ranks_of(way), steps=STEPS)
    for trained, launches in found:
        assert_same(trained, expected, losses=False)
        assert {*launches} == ({""} if way == "replicate" else {"blocks.0", "blocks.1", "blocks.2"})
        assert min(launches.values()) > STEPS // 2
