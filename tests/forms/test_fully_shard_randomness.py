"""Dropout and sums of a sharded model have the same bits in each run, wherever sums are made."""

import itertools

import pytest
import torch
from torch import nn

from dataparallel import comm
from dataparallel.composable import fully_shard
from dataparallel.testing.cases import seeded
from selection import others_long
from sharded_models import GPT
from sharded_steps import (
    LOOPS,
    MODELS,
    Trained,
    assert_same,
    batches_of,
    on_device,
    sharded,
    train,
)

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


def test_sharding_draws_no_random_number(slots, root):
    model = on_device(MODELS["gpt"].build, root)
    before = torch.get_rng_state()
    sharded(model, slots)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(model, nn.Module)


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
