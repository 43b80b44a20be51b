"""What tests that move tensors share: kinds of tensors, values that show the order of a sum, meaningful strides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Tagged(Tensor):
    """A tensor that is more than its data."""


def tagged(values: Tensor) -> Tensor:
    return values.as_subclass(Tagged)


def with_attribute(values: Tensor) -> Tensor:
    values.tag = "mine"
    return values


# Functions from values to a tensor of equal values, each with its own layout or class.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda values: values.clone(),
    "transposed": lambda values: values.t().contiguous().t(),
    "offset": lambda values: torch.stack([values, values])[1],
    "strided": lambda values: torch.stack([values, values], -1)[..., 0],
    "parameter": lambda values: nn.Parameter(values.clone(), requires_grad=False),
    "attribute": lambda values: with_attribute(values.clone()),
    "subclass": lambda values: tagged(values.clone()),
    "conjugate": lambda values: values.conj().resolve_conj().conj(),
    "sparse": lambda values: values.to_sparse(),
}


def of_many_magnitudes(*shape: int) -> Tensor:
    """Values whose sum depends on the order in which they are added."""
    return torch.randn(shape) * 10.0 ** torch.randint(-4, 4, shape)


def strides(tensor: Tensor) -> list[int]:
    """The strides of dimensions that have more than one element."""
    if tensor.numel() == 0:
        return []
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def devices_of(slots: list) -> list[torch.device]:
    return [torch.device(slot) for slot in slots]
