"""What differs between two nested results, in sentences that name the place. `check_op` calls it, nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dataparallel.batches.structures import children_of

_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9}
"""Relative and absolute; for other dtypes it is that of `torch.testing.assert_close`."""


def differences(got: Any, wanted: Any, path: str, whole: Callable[[Tensor], Tensor]) -> Iterator[str]:
    """One sentence for each leaf of ``got`` that is not as in ``wanted``.

    Args:
        got: the result that is checked.
        wanted: what is right. Its tensors are plain.
        path: the name of both.
        whole: makes a tensor of ``got`` one that can be compared.
    """
    if isinstance(wanted, Tensor) and isinstance(got, Tensor):
        difference = _of_tensors(whole(got), wanted)
        if difference:
            yield f"{path} {difference}"
        return
    children = children_of(wanted, path)
    others = children_of(got, path)
    if children is None or others is None or type(got) is not type(wanted):
        if not _equal(got, wanted):
            yield f"{path} is {_named(got)}, expected {_named(wanted)}"
        return
    names = [name for name, _ in children]
    if names != [name for name, _ in others]:
        yield f"{path} has {[name for name, _ in others]}, expected {names}"
        return
    for (name, one), (_, other) in zip(others, children, strict=True):
        yield from differences(one, other, name, whole)


def _of_tensors(got: Tensor, wanted: Tensor) -> str:
    if got.shape != wanted.shape:
        return f"has the shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    if got.dtype != wanted.dtype:
        return f"has the dtype {got.dtype}, expected {wanted.dtype}"
    tolerance = _TOLERANCE.get(wanted.dtype)
    try:
        torch.testing.assert_close(
            got.detach().cpu(), wanted.detach().cpu(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    except AssertionError as error:
        return "has other values: " + " ".join(str(error).split())
    return ""


def _equal(got: Any, wanted: Any) -> bool:
    if got is wanted:
        return True
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, (float, complex)):
        one, other = (torch.tensor(value, dtype=torch.complex128) for value in (got, wanted))
        return torch.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)
    return bool(got == wanted)


def _named(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two dense tensors have the same shape, dtype and bits. NaNs are equal to themselves."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).resolve_conj().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(flat[0], flat[1])
