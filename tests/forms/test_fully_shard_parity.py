"""A sharded model trains as on one device: each loop and each model, in float64 to 1e-9.

Options and setters are drawn by test_state_machine. Dropout and sums have the same bits in each run, wherever sums are
made.
"""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from dataparallel import comm
from dataparallel.composable import fully_shard, replicate
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.models import CASES
from selection import others_long
from sharded_models import GPT, Scaled
from sharded_steps import (
    LOOPS,
    MODELS,
    Model,
    Trained,
    assert_same,
    assert_same_training,
    batches_of,
    on_device,
    sharded,
    train,
)

every_loop = pytest.mark.parametrize("loop", LOOPS)


@pytest.mark.slots(3, long=[2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
@every_loop
def test_each_model_in_each_loop(loop, model, slots):
    assert_same_training(MODELS[model], slots, loop=LOOPS[loop])


ZOO = [case for case in CASES if case.name not in ("scripted", "traced", "scripted_child", "sparse_embedding")]


@pytest.mark.slots(3, long=[2, 8])
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_a_whole_model_is_one_unit(case, slots):
    """Every model of the zoo. Those with batch statistics are compared with `replicate`, which has each slot's too."""
    model = Model(case.build, case.batch)
    several, other = on_device(case.build, slots[0]), on_device(case.build, slots[0])
    several.units = list
    sharded(several, slots, dim=case.dim)
    if case.by_chunks:
        replicate(other, devices=slots, dim=case.dim)
    ours = train(several, batches_of(model, slots), case.optimizer)
    assert_same(ours, train(other, batches_of(model, slots), case.optimizer))


@pytest.mark.slots(3, long=[2, 4, 8])
@every_loop
def test_ignored_parameters_stay_what_they_are(loop, slots):
    assert_same_training(Model(seeded(Scaled), numbers(6)), slots, loop=LOOPS[loop], ignored=True)


RUNS = 3


def trained(build, slots: list, loop: str = "one_backward", **options) -> Trained:
    model = sharded(on_device(build, slots[0]), slots, **options)
    torch.manual_seed(7)
    return train(model, batches_of(MODELS["gpt"], slots), loop=LOOPS[loop])


def assert_same_bits(runs: list[Trained]) -> None:
    first, *others = runs
    for other in others:
        assert_same(other, first, atol=0)


@pytest.mark.slots(4, long=[2, 3, 8])
@pytest.mark.parametrize(
    ("loop", "reshard_after_forward"),
    others_long(itertools.product(LOOPS, [True, False]), [("one_backward", True), ("the_last_summed", False)]),
)
def test_gradients_repeat_from_run_to_run(reshard_after_forward, loop, slots):
    build = MODELS["gpt"].build
    assert_same_bits([trained(build, slots, loop, reshard_after_forward=reshard_after_forward) for _ in range(RUNS)])


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(4)
def test_what_moves_bytes_otherwise_changes_no_bit(slots):
    """The sums are the same, in the same order: whatever is kept after forward, and whether kernels read peers."""
    build = MODELS["gpt"].build
    runs = [trained(build, slots, reshard_after_forward=kept) for kept in (True, False, 2)]
    for transport in ("copy", "host"):
        with comm.using(transport=transport):
            runs.append(trained(build, slots))
    assert_same_bits(runs)


@pytest.mark.slots(4, long=[2, 8])
@pytest.mark.parametrize("recomputed", ["inside", "around"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpoints_recompute_with_the_same_masks(recomputed, use_reentrant, slots):
    with_checkpoints = trained(seeded(GPT, recomputed, use_reentrant, 0.5), slots)
    without = trained(seeded(GPT, "nothing", False, 0.5), slots)
    assert_same(with_checkpoints, without)
    without_dropout = trained(seeded(GPT, "nothing", False, 0.0), slots)
    assert not any(map(torch.equal, without.losses[0], without_dropout.losses[0]))


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3)
def test_a_backward_has_the_settings_of_the_call(slots, monkeypatch):
    """Its threads have none: nothing may pass between two devices that the user keeps apart."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(slots[0]), devices=slots)
    chosen = Counter()

    def noted(work, devices, *args, choose=comm.transport_for):
        transport = choose(work, devices, *args)
        chosen[work, type(transport).__name__] += len({*devices}) > 1
        return transport

    monkeypatch.setattr(comm, "transport_for", noted)
    with comm.using(transport="host"):
        loss = model(torch.ones(6, 4, device=slots[0])).square().sum()
    loss.backward()
    if len({*slots}) > 1:
        assert chosen["reduce_scatter", "ThroughHost"] == 1
    assert {name for (_, name), count in chosen.items() if count} <= {"ThroughHost"}
