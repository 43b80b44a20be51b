"""The option ``pad=``: `filled` makes outputs of one size of those that differ, and `checked_pad` checks the option.

``gather`` calls `filled` before it joins tensors. Each replica's tensors are filled on the replica's device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Number
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dataparallel.batches.batch_types import path_of_key
from dataparallel.batches.structures import tensors_in, with_leaves

Pad: TypeAlias = complex | Mapping[Any, Any] | None
"""A number, or by key what holds for the outputs under this key; ``None``: outputs that differ are refused."""

PAD_HINT = (
    "; the argument pad=NUMBER of the form, or of register_forward_method, fills outputs up to one size, "
    "and pad={KEY: NUMBER} those under a key"
)


def checked_pad(pad: Any, name: str = "pad") -> Pad:
    """Returns the option with numbers of Python.

    Raises:
        TypeError: it is neither a number, nor a mapping of numbers or of further such mappings, nor ``None``.
    """
    if isinstance(pad, Mapping):
        return {key: checked_pad(value, f"{name}[{key!r}]") for key, value in pad.items()}
    if pad is not None and not isinstance(pad, Number):
        raise TypeError(f"{name}={pad!r}: expected a number, a dict with a number for each key of the outputs, or None")
    number: Any = pad
    return number.item() if hasattr(number, "item") else number  # a number of NumPy becomes one of Python


def pad_under(pad: Pad, path: str) -> Pad:
    """Returns what holds for the child of a container with this path element."""
    if not isinstance(pad, Mapping):
        return pad
    return next((value for key, value in pad.items() if path in (path_of_key(key), f".{key}")), None)


def filled(tensors: Sequence[Tensor], dim: int, pad: complex, path: str) -> list[Tensor]:
    """Returns tensors that have one size in each dimension but ``dim``, if they have the same number of dimensions.

    What a strided tensor lacks is added at the end of the dimension, and is ``pad``. Gradients reach the rest.

    Raises:
        ValueError: the dtype of a tensor that is filled has no such value.
    """
    if tensors[0].layout is not torch.strided or len({tensor.dim() for tensor in tensors}) > 1:
        return [*tensors]
    most = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    results = []
    for tensor in tensors:
        missing = [size - own for size, own in zip(most, tensor.shape, strict=True)]
        if missing:
            missing[dim] = 0
        if any(missing):
            _check_value(pad, tensor.dtype, path)
            both_ends = [number for count in reversed(missing) for number in (0, count)]
            tensor = torch.constant_pad_nd(tensor, both_ends, pad)
        results.append(tensor)
    return results


def with_all_entries(outputs: Sequence[tuple[Any, ...]], dim: int, pad: complex, path: str) -> list[tuple[Any, ...]]:
    """Returns tuples as long as the longest. Tensors in entries that a replica lacks have its samples, and are ``pad``.

    A replica that has stopped earlier returns fewer entries, if there is one for each step. A tuple without tensors
    stays as it is.
    """
    longest = max(outputs, key=len)
    results = []
    for output in outputs:
        own = next((tensor for tensor in tensors_in(output) if -tensor.dim() <= dim < tensor.dim()), None)
        if own is not None:
            blank = partial(_blank, own=own, dim=dim, pad=pad, path=path)
            output += tuple(with_leaves(entry, blank) for entry in longest[len(output) :])
        results.append(output)
    return results


def _blank(leaf: Any, own: Tensor, dim: int, pad: complex, path: str) -> Any:
    """Returns a tensor of ``pad`` like another replica's ``leaf``, for the samples and on the device of ``own``."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    _check_value(pad, leaf.dtype, path)
    shape = [*leaf.shape]
    if -len(shape) <= dim < len(shape):
        shape[dim] = own.shape[dim]
    return torch.full(shape, pad, dtype=leaf.dtype, device=own.device)


def _check_value(pad: complex, dtype: torch.dtype, path: str) -> None:
    if dtype.is_complex:
        fits = True
    elif isinstance(pad, complex):
        fits = False
    elif dtype == torch.bool:
        fits = pad in (0, 1)
    elif dtype.is_floating_point:
        fits = not math.isfinite(pad) or abs(pad) <= torch.finfo(dtype).max
    else:
        info = torch.iinfo(dtype)
        fits = math.isfinite(pad) and pad == int(pad) and info.min <= pad <= info.max
    if not fits:
        raise ValueError(
            f"cannot gather {path}: pad={pad!r} is no value of dtype {dtype}; pass one that is, or one for each key"
        )
