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
from dataparallel.composable import CPUOffloadPolicy, fully_shard, replicate
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


def check(model: str, loop: str, slots: list) -> None:
    assert_same_training(MODELS[model], slots, loop=LOOPS[loop])


every_loop = pytest.mark.parametrize("loop", LOOPS)


@pytest.mark.slots(3, long=[2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
@every_loop
def test_each_model_in_each_loop(loop, model, slots):
    check(model, loop, slots)


class TestOtherSlots:
    @pytest.mark.devices("sim", "cuda")  # CPU slots are on one device anyway
    @pytest.mark.parametrize("model", others_long(MODELS, ["gpt", "resnet", "unused and repeated units"]))
    def test_slots_on_one_device(self, model, root):
        check(model, "one_backward", [root] * 3)

    @pytest.mark.parametrize("loop", ["one_backward", "the_last_summed", "last_forward_first"])
    def test_two_slots_on_each_of_two_devices(self, loop, make_slots):
        slots = [make_slots(2)[place] for place in (0, 1, 0, 1)]
        check("gpt", loop, slots)

    @pytest.mark.devices("sim", "cuda")  # else these are the slots of the other tests
    @pytest.mark.parametrize("model", others_long(MODELS, ["gpt", "unused and repeated units"]))
    def test_cpu_slots(self, model):
        check(model, "one_backward", ["cpu"] * 2)

    def test_one_slot(self, root):
        check("gpt", "the_last_summed", [root])


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
@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy()}], ids=str
)
def test_batch_statistics_are_those_of_replicate(options, slots):
    """Each slot normalises its own chunk, and the model's running statistics are those of the first."""
    model = Model(seeded(lambda: MODELS["resnet"].build().train()), MODELS["resnet"].batch)
    several, other = on_device(model.build, slots[0]), on_device(model.build, slots[0])
    assert several.training
    sharded(several, slots, **options)
    replicate(other, devices=slots)
    ours, theirs = (train(each, batches_of(model, slots)) for each in (several, other))
    assert_same(ours, theirs)


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


@pytest.mark.slots(4)
def test_options_that_move_bytes_otherwise_change_no_bit(slots):
    """The sums are the same, in the same order, whatever is kept after forward."""
    build = MODELS["gpt"].build
    assert_same_bits([trained(build, slots, reshard_after_forward=kept) for kept in (True, False, 2)])


@pytest.mark.slots(4, long=[8])
@pytest.mark.parametrize(
    ("recomputed", "use_reentrant"),
    others_long(
        [("nothing", False), *itertools.product(["inside", "around"], [True, False])],
        [("nothing", False), ("around", False)],
    ),
)
def test_dropout_repeats_from_run_to_run(recomputed, use_reentrant, slots):
    build = seeded(GPT, recomputed, use_reentrant, 0.5)
    runs = [trained(build, slots) for _ in range(RUNS)]
    assert_same_bits(runs)


@pytest.mark.slots(4, long=[2, 8])
@pytest.mark.parametrize("recomputed", ["inside", "around"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpoints_recompute_with_the_same_masks(recomputed, use_reentrant, slots):
    with_checkpoints = trained(seeded(GPT, recomputed, use_reentrant, 0.5), slots)
    without = trained(seeded(GPT, "nothing", False, 0.5), slots)
    assert_same(with_checkpoints, without)


@pytest.mark.slots(4)
def test_dropout_is_on(slots):
    """Otherwise the tests above would compare nothing."""
    with_dropout, without = (trained(seeded(GPT, "around", False, p), slots) for p in (0.5, 0.0))
    with pytest.raises(AssertionError):
        assert_same(with_dropout, without)


def _gradients(devices, batch_size=16, passes=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 13)) for _ in range(3)))
    for block in model:
        fully_shard(block, devices=devices)
    fully_shard(model, devices=devices)
    batch = torch.randn(batch_size, 13).to(devices[0])
    for _ in range(passes):  # the second is added to the first
        model(batch).square().sum().backward()
    return [parameter.grad.full_tensor().cpu() for parameter in model.parameters()]


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3, 4, long=[8])
@pytest.mark.parametrize("batch_size", [16, 2])  # of 2 rows, not all slots get one
def test_sums_have_the_same_bits_whoever_makes_them(slots, batch_size):
    """Kernels that read peers, plain copies, and copies through the host."""
    found = _gradients(slots, batch_size)
    for transport in ("copy", "host"):
        with comm.using(transport=transport):
            assert all(map(torch.equal, found, _gradients(slots, batch_size)))


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
