"""`compare` checks that all ranks begin the same, and `send_values` gives rank 0's values to all ranks.

Descriptions are compared before anything else is sent, so a difference is an error on every rank and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dataparallel import _torch
from dataparallel.comm.buckets import Bucket, fill_buckets, flatten, has_strides, layout_of, unflatten
from dataparallel.comm.checks import why_not_movable
from dataparallel.machines.collectives import stage
from dataparallel.machines.lanes import Lane, Machines

CAP_BYTES = 25 * 2**20
"""The size of the buckets in which values travel; a larger tensor has a bucket of its own."""


def describe(
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    slots: Sequence[torch.device],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Describes, for `compare`, what has to be the same on all ranks.

    Parameters (a tied one under one name) and buffers have to agree in names and their order, shapes, dtypes, types of
    device, strides and ``requires_grad``. The number of slots and their type have to agree, not which devices they are.
    """
    types = ", ".join(sorted({slot.type for slot in slots}))
    described: dict[str, Any] = {"slots": f"number {len(slots)}, type {types}", **settings}
    for kind, named in (("parameter", parameters), ("buffer", buffers)):
        described |= {f"{kind} {name}": _properties(tensor) for name, tensor in named.items()}
    return described


def _properties(tensor: Tensor) -> str:
    shape = "not initialised" if is_lazy(tensor) else "nested" if tensor.is_nested else tuple(tensor.shape)
    text = f"shape {shape}, dtype {tensor.dtype}, device {tensor.device.type}, layout {tensor.layout}"
    if not is_lazy(tensor) and has_strides(tensor):  # flat gradients have the order of the memory
        layout = layout_of(tensor)
        text += f", strides {'row-major' if layout.row_major else layout.core_stride}"
    return f"{text}, requires_grad {tensor.requires_grad}"


@contextmanager
def failing_together(machines: Machines) -> Iterator[None]:
    """If the block raises on this rank, the other ranks raise where they wait for this rank."""
    try:
        yield
    except BaseException as error:
        machines.state.fail(error)
        raise


def compare(machines: Machines, what: str, description: Mapping[str, Any]) -> None:
    """Checks that all ranks give the same description, a line for each name, of what is about to begin."""
    text = "\n".join(" ".join(f"{name}: {value}".split()) for name, value in description.items())
    machines.words.gather(f"the start of {what}", text, None).wait()


def send_values(lane: Lane, named: Mapping[str, Tensor], cap_bytes: int = CAP_BYTES) -> None:
    """Copies the values of rank 0's tensors into the tensors of all ranks, in place.

    Tensors travel as bytes in buckets, so any dtypes and strides will do, also complex, 0-dim and empty tensors. The
    copies run on the current streams of the calling thread, and version counters move on the ranks that receive.

    If a rank fails or is gone, some tensors may have the values of rank 0 already.
    """
    machines, kind = lane.machines, "values of rank 0"
    with failing_together(machines):
        names, tensors = [*named], [*named.values()]
        text = f"{kind}\nbytes in a buffer: {cap_bytes}"
        for name, tensor in zip(names, tensors, strict=True):
            _check_values(name, tensor)
            text += f"\n{name}: shape {tuple(tensor.shape)}, dtype {tensor.dtype}, device {tensor.device.type}"
        order = [i for i, tensor in enumerate(tensors) if tensor.numel()]
        for group in fill_buckets(tensors, order, cap_bytes, cap_bytes):  # they depend only on what is compared
            bucket, like = Bucket.row_major_of(tensors, group), tensors[group[0]]
            with torch.no_grad(), _torch.DisableTorchFunctionSubclass():
                is_sent = machines.rank == 0
                flat = flatten(bucket, tensors) if is_sent else like.new_empty(bucket.numel)
                calls, what = [stage(machines, flat).broadcast], [f"{names[group[0]]!r} and others"]
                (result,) = lane.launch(kind, what, calls, text)
                received, text = result.wait(), f"{kind}\nfrom {names[group[0]]}"
                for i, piece in zip(bucket.indices, () if is_sent else unflatten(bucket, received), strict=False):
                    _copy(tensors[i], piece)


def _copy(tensor: Tensor, value: Tensor) -> None:
    # Repeated elements, as `expand` makes them, are one element of memory.
    for dim, (step, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if step == 0 and size > 1:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def _check_values(name: str, tensor: Tensor) -> None:
    what = f"cannot send the values of rank 0: {name!r}"
    if problem := why_not_movable(tensor):
        raise ValueError(f"{what} {problem}. Give it values on every rank, with to_empty() and load_state_dict()")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{what} was made under torch.inference_mode() and cannot be changed in place; pass a clone()")
    is_strided = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not is_strided or hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(
            f"{what} is a {type(tensor).__name__} of layout {tensor.layout}, and values travel as the bytes of plain "
            "strided tensors. Keep it out of what the ranks share (ignored), or make it a plain tensor"
        )
