"""Tensors that are more than their values, and values whose sum depends on the order."""

import torch
from torch import Tensor


class Tagged(Tensor):
    """A subclass of `Tensor`."""


def tagged(values: Tensor) -> Tensor:
    return values.as_subclass(Tagged)


def with_attribute(values: Tensor) -> Tensor:
    """The tensor itself, which has a Python attribute from now on."""
    values.tag = "mine"
    return values


def of_many_magnitudes(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Values whose sum depends on the order in which they are added, if the dtype is not of integers."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 9, shape).to(dtype)
    return (torch.randn(shape) * 10.0 ** torch.randint(-4, 4, shape)).to(dtype)
