"""The forms split batches by numbers of samples or by shares, and results do not depend on it."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from each_form import FORMS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


class Sizes(nn.Linear):
    """It returns how many samples each replica gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_tensor([len(x)])


def assign(form: str, model: Any, chunk_sizes: Any) -> None:
    if form == "DataParallel":
        model.options.chunk_sizes = chunk_sizes
    else:
        (replicate if form == "replicate" else fully_shard).state(model).options.chunk_sizes = chunk_sizes


def gradients(model: nn.Module) -> list[Tensor]:
    return [getattr(p.grad, "full_tensor", lambda g=p.grad: g)().clone() for p in model.parameters()]


def check_step(model: nn.Module, single: nn.Module, x: Tensor) -> None:
    """Output and gradients are those of one device."""
    model.zero_grad()
    single.zero_grad()
    output, expected = model(x), single(x)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-12)
    for found, wanted in zip(gradients(model), single.parameters(), strict=True):
        torch.testing.assert_close(found.to(wanted.device), wanted.grad, rtol=1e-9, atol=1e-12)


@pytest.fixture
def single(root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return Net().double().to(root)


@pytest.mark.parametrize("form", FORMS)
def test_results_equal_one_device_under_any_split(
    form: str, single: nn.Module, slots: list, root: torch.device
) -> None:
    model = FORMS[form](copy.deepcopy(single), slots, chunk_sizes=None)

    @settings(max_examples=10)
    @given(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), st.integers(1, 20))
    def check(shares: list[float], total: int) -> None:
        assign(form, model, shares)
        check_step(model, single, torch.randn(total, 4, dtype=torch.float64, device=root))

    check()


@pytest.mark.parametrize("form", FORMS)
def test_chunk_sizes_may_be_assigned_between_calls(form: str, slots: list, root: torch.device) -> None:
    model = FORMS[form](Sizes(4, 5).to(root), slots, chunk_sizes=[1, 4, 2])
    for chunk_sizes, sizes in (([2, 2, 3], [2, 2, 3]), ([3.0, 1, 3], [3, 1, 3]), (None, [3, 3, 1])):
        assign(form, model, chunk_sizes)
        assert model(torch.zeros(7, 4, device=root)).tolist() == sizes
    with pytest.raises(ValueError, match="has 2 entries for 3 slots"):
        assign(form, model, [0.5, 0.5])
    with pytest.raises(ValueError, match="has 2 entries for 3 slots"):
        FORMS[form](Sizes(4, 5).to(root), slots, chunk_sizes=[0.5, 0.5])


def test_shares_are_checked_again_where_slots_have_changed(single: nn.Module, slots: list, root: torch.device) -> None:
    model = DataParallel(single, slots, chunk_sizes=[0.5, 1, 1])
    model.device_ids = model.device_ids[:2]
    with pytest.raises(ValueError, match="has 3 entries for 2 slots"):
        model(torch.zeros(7, 4, dtype=torch.float64, device=root))
