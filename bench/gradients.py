"""A loss, and gradients of one way to make a step beside those of another: checks that are made outside of timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def mean_square(output: Tensor) -> Tensor:
    """A loss that needs no labels."""
    return output.square().mean()


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Raises `AssertionError` if a parameter has no gradient."""
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return gradients


def take_gradients(module: nn.Module) -> list[Tensor]:
    """`gradients_of`, which the module no longer has afterwards."""
    gradients = gradients_of(module)
    module.zero_grad()
    return gradients


def assert_same_gradients(
    found: Sequence[Tensor], wanted: Sequence[Tensor], rtol: float | None = None, atol: float | None = None
) -> None:
    """Raises `AssertionError` unless the two agree up to rounding. They are sums of chunks in different orders.

    ``atol`` is relative to the largest entry of each tensor, because single entries may cancel nearly to zero. Whole
    tensors may too: the bias of an attention's keys changes nothing. So the rounding of the largest gradient is allowed
    in all of them. The defaults of both tolerances depend on the dtype.
    """
    largest_of_all = max((float(expected.abs().max()) for expected in wanted), default=0.0)
    for gradient, expected in zip(found, wanted, strict=True):
        default = (1e-9, 1e-12) if expected.dtype == torch.float64 else (1e-4, 1e-5)
        relative = default[0] if rtol is None else rtol
        largest = float(expected.abs().max())
        rounding = torch.finfo(expected.dtype).eps * largest_of_all
        absolute = max((default[1] if atol is None else atol) * largest, rounding)
        torch.testing.assert_close(gradient, expected, rtol=relative, atol=absolute)
