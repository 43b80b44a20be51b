"""`fully_shard` over machines: steps of several machines are those of one device, in float64 to 1e-9.

Batches are split unevenly among machines and slots. `sharded_machines` says what a step is.
"""

import pytest

from sharded_machines import SPREADS, Run, assert_train_as_one
from sharded_steps import LOOPS

pytestmark = [pytest.mark.usefixtures("one_intra_op_thread")]

IN_ANY_ORDER = ["gpt", "gpt, units of several kinds", "unused and repeated units"]
IN_ONE_ORDER = [
    "gpt, units of several kinds",
    "gpt, checkpoints inside units",
    "gpt, checkpoints around units",
    "gpt, reentrant checkpoints inside units",
    "gpt, reentrant checkpoints around units",
]
OPTIONS = [
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
]


@pytest.mark.parametrize("way", SPREADS)
def test_twenty_steps(way):
    assert_train_as_one(way, [Run(steps=20)], slots=1 if way == "2-D" else 2)


@pytest.mark.parametrize("way", ["hybrid", "1-D"])
def test_each_loop(way):
    """With gradients that wait, several backwards, several forwards."""
    assert_train_as_one(way, [Run(loop=loop, steps=3) for loop in LOOPS])


@pytest.mark.parametrize("way", ["hybrid", "1-D"])
def test_each_model(way):
    """Machines that only replicate may use other units than the others."""
    models = IN_ONE_ORDER + (["unused and repeated units"] if way == "hybrid" else [])
    assert_train_as_one(way, [Run(model, steps=3) for model in models])


@pytest.mark.parametrize("way", [pytest.param("hybrid", marks=pytest.mark.smoke), "1-D"])
def test_when_parameters_are_freed(way):
    options = OPTIONS + ([{"reshard_after_forward": 2}] if way == "1-D" else [])
    assert_train_as_one(way, [Run(steps=3, options=each) for each in options])


@pytest.mark.parametrize("way", ["hybrid", "1-D"])
def test_in_groups_of_slots(way):
    assert_train_as_one(way, [Run(steps=3, options={"reshard_after_forward": 2})], slots=4)
