"""The helpers accept what is right, refuse what is nearly right, and clean up after themselves."""

import contextlib
import types
from collections.abc import Callable

import pytest
import torch
from loops import in_place
from torch import nn

from dataparallel import DataParallel
from dataparallel.testing import parity
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.models import CASES
from dataparallel.testing.steps import assert_steps_match, detached, run_step

PERTURBATION = parity.Perturbation(seed=1)
cases = {case.name: case for case in CASES}
build = seeded(nn.Linear, 6, 3)


def hides_its_weight() -> nn.Module:
    """Computes with a weight that no replica can find, inside an object of a foreign type."""
    net = build()
    hidden = types.SimpleNamespace(weight=net.weight)
    net.hidden = hidden
    net.forward = lambda x: nn.functional.linear(x, hidden.weight, net.bias)
    return net


both_forms = pytest.mark.parametrize("wrap", [DataParallel, in_place])


@pytest.mark.smoke
@both_forms
def test_a_replica_that_uses_the_source_is_noticed(wrap: Callable, slots: list) -> None:
    batch, slots = numbers(6)(5, 0), [slots[0]] * 3  # on distinct devices torch would tell
    parity.assert_same_step(build, batch, slots, wrap=wrap, perturbation=PERTURBATION)
    parity.assert_same_step(hides_its_weight, batch, slots, wrap=wrap)
    with pytest.raises(AssertionError, match=r"output.*not close"):
        parity.assert_same_step(hides_its_weight, batch, slots, wrap=wrap, perturbation=PERTURBATION)


def test_replicas_that_are_the_source_are_noticed_before_they_run(slots: list) -> None:
    class RunsTheSource(DataParallel):
        def replicate(self, module: nn.Module, device_ids: list) -> list[nn.Module]:
            return [module] * len(device_ids)

    source = build().to(slots[0])
    before = detached(source.state_dict())
    parallel = RunsTheSource(source, [slots[0]] * 2)
    with (
        parity.perturbed_slots(parallel, PERTURBATION),
        pytest.raises(AssertionError, match="slot 0 computes with tensors of the source"),
    ):
        parallel(torch.zeros(4, 6, dtype=torch.float64, device=slots[0]))
    torch.testing.assert_close(source.state_dict(), before, rtol=0, atol=0)


@both_forms
def test_it_ends_with_the_block_and_leaves_the_source_alone(wrap: Callable, slots: list) -> None:
    source = build().to(slots[0])
    x = torch.ones(2 * len(slots), 6, dtype=torch.float64, device=slots[0])
    before, expected = detached(source.state_dict()), detached(source(x))
    parallel = wrap(source, slots)
    outputs = []
    with contextlib.suppress(ZeroDivisionError), parity.perturbed_slots(parallel, PERTURBATION):
        outputs.append(parallel(x))
        with parity.perturbed_slots(parallel, parity.Perturbation(seed=2)):
            outputs.append(parallel(x))
        outputs.append(parallel(x))
        raise ZeroDivisionError
    once, twice, again = outputs
    assert torch.equal(once, again)
    assert not any(torch.isclose(one, other).any() for one, other in ((once, expected), (twice, once)))
    torch.testing.assert_close(parallel(x), expected)
    torch.testing.assert_close(source.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("parallel", [build(), lambda x: x], ids=["a plain module", "a function"])
def test_what_makes_no_replicas_is_refused(parallel: Callable) -> None:
    with pytest.raises(TypeError, match="pass a DataParallel"), parity.perturbed_slots(parallel, PERTURBATION):
        pass


def test_one_chunk_is_the_whole_step() -> None:
    for case in CASES:
        batch = case.batch(4, 0)
        step = parity.reference_step_by_chunks(case.build, case.build(), batch, 1, dim=case.dim)
        assert_steps_match(run_step(case.build(), batch), step)


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
