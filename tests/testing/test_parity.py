"""The helpers accept what is right, refuse what is nearly right, and clean up after themselves."""

import contextlib
import importlib

import pytest
import torch
from torch import nn

from dataparallel.testing import parity
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.models import CASES
from dataparallel.testing.steps import assert_steps_match, detached, run_step

PERTURBATION = parity.Perturbation(seed=1)
cases = {case.name: case for case in CASES}
build = seeded(nn.Linear, 6, 3)


def test_noise_depends_on_seed_slot_and_tensor() -> None:
    like = torch.empty(2, 3, dtype=torch.complex128)
    noise = PERTURBATION.noise(like, 1, 2)
    assert noise.dtype == like.dtype
    assert noise.shape == like.shape
    assert torch.equal(noise, PERTURBATION.noise(like, 1, 2))
    for other in (
        PERTURBATION.noise(like, 2, 1),
        PERTURBATION.noise(like, 1, 1),
        PERTURBATION.noise(like, 2, 2),
        parity.Perturbation(seed=2).noise(like, 1, 2),
    ):
        assert not torch.isclose(noise, other).any()


def test_broadcast_is_put_back_after_an_error() -> None:
    room = importlib.import_module("dataparallel.replicate")
    before = room.broadcast_bucket
    with contextlib.suppress(ZeroDivisionError), parity.perturbed_slots(build(), PERTURBATION):
        assert room.broadcast_bucket is not before
        raise ZeroDivisionError
    assert room.broadcast_bucket is before


def test_another_module_is_not_perturbed_by_mistake(slots: list) -> None:
    parallel = parity.DataParallel(build().to(slots[0]), slots)
    with (
        parity.perturbed_slots(build(), PERTURBATION),
        pytest.raises(AssertionError, match="not one of"),
    ):
        parallel(torch.zeros(4, 6, dtype=torch.float64, device=slots[0]))


def test_the_reference_only_reads_the_source() -> None:
    case = cases["convnet_train"]
    source = case.build()
    before = detached(source.state_dict())
    step = parity.reference_step_by_chunks(case.build, source, case.batch(5, 0), 3, perturbation=PERTURBATION)
    for name, value in source.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in source.parameters())
    assert not torch.equal(step.buffers["1.running_mean"], before["1.running_mean"])


def test_one_chunk_is_the_whole_step() -> None:
    for case in CASES:
        batch = case.batch(4, 0)
        step = parity.reference_step_by_chunks(case.build, case.build(), batch, 1, dim=case.dim)
        assert_steps_match(run_step(case.build(), batch), step)


def test_samples_that_see_each_other_need_the_reference_by_chunks(slots: list) -> None:
    case = cases["convnet_train"]
    with pytest.raises(AssertionError, match="output"):
        parity.assert_same_step(case.build, case.batch(5, 0), slots)


def test_a_relative_error_of_a_millionth_is_caught(slots: list) -> None:
    def wrap(module: nn.Module, slots: list, dim: int):
        return lambda x: module(x) * (1 + 1e-6)

    batch = numbers(6)(5, 0)
    with pytest.raises(AssertionError, match="output"):
        parity.assert_same_step(build, batch, slots, wrap=wrap)
    with pytest.raises(AssertionError, match="output"):
        parity.assert_same_training(build, [batch], slots, wrap=wrap)


def test_zeros_in_place_of_no_gradient_are_caught(slots: list) -> None:
    case = cases["unused"]

    def wrap(module: nn.Module, slots: list, dim: int):
        return lambda x: module(x) + 0 * sum(p.sum() for p in module.parameters())

    with pytest.raises(AssertionError, match=r"gradients\['unused.weight'\].*None on one device"):
        parity.assert_same_step(case.build, case.batch(5, 0), slots, wrap=wrap)
