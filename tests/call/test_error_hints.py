"""Errors that come from the split say what to do: the hint is in the note that names the replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each_form import Form


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_batch_norm_with_one_sample_in_a_chunk(form: Form, slots: list, root: torch.device) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(root)

    x = torch.randn(len(slots), 4, device=root)
    with pytest.raises(ValueError, match="more than 1 value per channel") as error:
        form(build(), slots)(x)
    assert "pass sync_batch_norm=True where you wrap the model" in notes(error.value)
    form(build(), slots, sync_batch_norm=True)(x)  # what the note says
    form(build(), slots)(torch.randn(2 * len(slots), 4, device=root))


class Masked(nn.Module):
    """Its mask is no buffer."""

    def __init__(self, root: torch.device, kept_in: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = kept_in(torch.ones(4, device=root))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask
        while not isinstance(mask, Tensor):
            mask = next(iter(mask.values() if isinstance(mask, dict) else mask))
        output: Tensor = self.linear(x) * mask
        return output


@pytest.mark.devices("sim", "cuda")
@pytest.mark.apart(2)
@pytest.mark.parametrize("kept_in", [lambda t: t, lambda t: [t], lambda t: {"all": t}], ids=["", "list", "dict"])
def test_a_tensor_in_an_attribute_is_named(kept_in: Any, form: Form, slots: list, root: torch.device) -> None:
    model = form(nn.Sequential(nn.Linear(4, 4), Masked(root, kept_in)).to(root), slots)
    with pytest.raises(RuntimeError) as error, torch.no_grad():
        model(torch.randn(6, 4, device=root))
    assert f"The attribute '1.mask' of the Sequential is on {root}" in notes(error.value)
    assert "self.register_buffer('mask', tensor)" in notes(error.value)


MASK: list[Tensor] = []


class Global(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * MASK[0]


@pytest.mark.devices("sim", "cuda")
@pytest.mark.apart(2)
def test_a_tensor_from_elsewhere_is_told_apart(slots: list, root: torch.device, form: Form) -> None:
    MASK[:] = [torch.ones(4, device=root)]
    model = form(nn.Sequential(nn.Linear(4, 4), Global()).to(root), slots)
    with pytest.raises(RuntimeError) as error, torch.no_grad():
        model(torch.randn(6, 4, device=root))
    assert "Make tensors in forward with device=x.device" in notes(error.value)
