"""Both composable forms over machines: their steps are those of one device, in float64 to 1e-9.

Batches are split unevenly among machines and slots. `sharded_machines` says what a step is.
"""

import pytest

from sharded_machines import REPLICATED, SPREADS, Run, assert_train_as_one
from sharded_steps import LOOPS

IN_ANY_ORDER = ["gpt, checkpoints inside units", "gpt, checkpoints around units"]
IN_ONE_ORDER = [
    "gpt, units of several kinds",
    *IN_ANY_ORDER,
    "gpt, reentrant checkpoints inside units",
    "gpt, reentrant checkpoints around units",
]
USED_BY_SOME = ["unused and repeated units"]
MODELS = {"hybrid": IN_ONE_ORDER + USED_BY_SOME, "1-D": IN_ONE_ORDER, "replicate": IN_ANY_ORDER + USED_BY_SOME}
"""Machines that only replicate may use other units than the others."""


@pytest.mark.smoke
def test_two_steps_of_both_forms():
    assert_train_as_one("hybrid", [Run(steps=2), Run(steps=2, way="replicate")])


@pytest.mark.parametrize("way", [*SPREADS, *REPLICATED])
def test_twenty_steps(way):
    assert_train_as_one(way, [Run(steps=20)])


@pytest.mark.parametrize("way", MODELS)
def test_each_loop(way):
    """With gradients that wait, several backwards, several forwards."""
    assert_train_as_one(way, [Run(loop=loop, steps=3) for loop in LOOPS])


@pytest.mark.parametrize("way", MODELS)
def test_each_model(way):
    assert_train_as_one(way, [Run(model, steps=3) for model in MODELS[way]])


@pytest.mark.parametrize(
    ("way", "reshard", "slots"),
    [("hybrid", [True, False], 2), ("1-D", [True, False, 2], 2), ("hybrid", [2], 4), ("1-D", [2], 4)],
)
def test_when_parameters_are_freed(way, reshard, slots):
    options = [{"reshard_after_forward": each} for each in reshard]
    assert_train_as_one(way, [Run(steps=3, options=each) for each in options], slots=slots)
