"""The start: all ranks check that they are about to do the same, and rank 0's values go to all.

Descriptions are compared before anything else is sent, so a difference is an error on every rank and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dataparallel import _torch
from dataparallel.comm.buckets import layout_of
from dataparallel.comm.checks import why_not_movable
from dataparallel.machines.agreement import as_text
from dataparallel.machines.arguments import check_sendable
from dataparallel.machines.collectives import ALIGNED, broadcast, stage
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.group import Machines
from dataparallel.machines.rounds import PendingResult

CAP_BYTES = 25 * 2**20
"""The size of the flat buffers in which values travel; a larger tensor has one of its own."""

UNDER_WAY = 2  # buffers: one is filled while the other one travels


def describe(
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    slots: Sequence[torch.device],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """What has to be the same on all ranks, as `compare` takes it.

    Parameters (a tied one under one name) and buffers have to agree in names and their order, shapes, dtypes, types of
    device, strides and ``requires_grad``. The number of slots and their type have to agree, not which devices they are.
    """
    described: dict[str, Any] = {
        "slots": {"number": len(slots), "type": ", ".join(sorted({slot.type for slot in slots}))}
    }
    described |= settings
    for kind, named in (("parameter", parameters), ("buffer", buffers)):
        described |= {f"{kind} {name}": _properties(tensor) for name, tensor in named.items()}
    return described


def _properties(tensor: Tensor) -> dict[str, Any]:
    properties = {"dtype": tensor.dtype, "device": tensor.device.type, "requires_grad": tensor.requires_grad}
    if is_lazy(tensor):
        return {"shape": "not initialised", **properties}
    if tensor.layout is not torch.strided or tensor.is_nested:
        return {"shape": "nested" if tensor.is_nested else tuple(tensor.shape), "layout": tensor.layout, **properties}
    layout = layout_of(tensor)
    # Flat gradients have the order of the memory, so it is part of what ranks send each other.
    strides = "row-major" if layout.row_major else layout.core_stride
    return {"shape": layout.shape, **properties, "strides": strides}


@contextmanager
def failing_together(machines: Machines | None) -> Iterator[None]:
    """An error inside, on this rank, makes the other ranks raise in their next round instead of waiting for this one.

    Put it around what this rank checks or prepares by itself while the others may be on their way to `compare`.
    """
    try:
        yield
    except MachinesError:
        raise  # all ranks know of it
    except BaseException as error:
        if machines is not None:
            machines.queue.signal_failure(error)
        raise


def compare(machines: Machines, what: str, description: Mapping[str, Any]) -> None:
    """Checks that all ranks give the same description of what is about to begin: see `agreement.as_text`.

    Raises:
        MachinesDiffer: on every rank, with the same message: it lists what differs and on which ranks.
    """
    machines.queue.begin_round(f"the start of {what}", as_text(description)).end([]).wait()


def send_values(machines: Machines, named: Mapping[str, Tensor], cap_bytes: int = CAP_BYTES) -> None:
    """Gives tensors of all ranks the values that those of rank 0 have, in place.

    Tensors travel as bytes in flat buffers, so their dtypes and strides do not matter: complex ones, 0-dim ones and
    those without elements are among them. A tensor that comes under several names travels once. The copies run on the
    current streams of the calling thread, and version counters move on the ranks that receive.

    Raises:
        MachinesDiffer: on every rank: names, shapes, dtypes or types of device differ.
        ValueError: a tensor cannot take values, or the group cannot send from its device.
        TypeError: a tensor is not a plain strided one.
        MachinesError: a rank has failed, or is gone. Some tensors may have the values of rank 0 already if it went on
            the way, otherwise nothing is changed.
    """
    with failing_together(machines):
        # Each tensor under its first name.
        first = {id(tensor): name for name, tensor in reversed([*named.items()])}
        named = {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}
        _check_values(named)
        check_sendable(machines, [tensor.device for tensor in named.values()])
        buckets = _planned(named, cap_bytes)
    exchange = machines.queue.begin_round("values of rank 0", as_text(_described(named, cap_bytes)))
    under_way: deque[tuple[_Bucket, PendingResult]] = deque()
    try:
        for bucket in buckets:
            if len(under_way) == UNDER_WAY:
                _arrive(machines, *under_way.popleft())
            flat = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=bucket.device)
            if machines.rank == 0:
                _fill(bucket, flat)
            # Staged here, where the current stream has filled it.
            sending = partial(broadcast, machines, stage(machines, flat))
            under_way.append((bucket, exchange.launch(f"{bucket.parts[0].name!r} and others", sending)))
    except MachinesError:
        raise  # all ranks know of it
    except BaseException as error:

        def fail(error: BaseException = error) -> NoReturn:
            raise error

        # The other ranks wait for the rest of the round: the launcher breaks the group.
        exchange.launch("the rest", fail)
        raise
    ended = exchange.end([])
    while under_way:
        _arrive(machines, *under_way.popleft())
    ended.wait()


class _Part(NamedTuple):
    name: str
    tensor: Tensor
    offset: int  # in bytes


@dataclass
class _Bucket:
    device: torch.device
    parts: list[_Part]
    nbytes: int = 0


def _check_values(named: Mapping[str, Tensor]) -> None:
    for name, tensor in named.items():
        problem = why_not_movable(tensor)
        if problem:
            raise ValueError(
                f"cannot send the values of rank 0: {name!r} {problem}. Give it values on every rank before, for "
                "example with to_empty() and load_state_dict()"
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"cannot send the values of rank 0: {name!r} was made under torch.inference_mode() and cannot be "
                "changed in place; make the module outside of it, or pass a clone()"
            )
        strided = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
        if not strided or hasattr(tensor, "__tensor_flatten__"):
            kind = type(tensor).__name__ if strided else f"tensor of layout {tensor.layout}"
            raise TypeError(
                f"cannot send the values of rank 0: {name!r} is a {kind}, and values travel as the bytes of plain "
                "strided tensors. Keep it out of what the ranks share (ignored), or make it a plain tensor"
            )


def _described(named: Mapping[str, Tensor], cap_bytes: int) -> dict[str, Any]:
    """What decides how the values travel. Devices of one type have numbers, in the order of their first tensors."""
    seen: dict[torch.device, int] = {}
    return {"bytes in a buffer": cap_bytes} | {
        name: {
            "shape": tuple(tensor.shape),
            "dtype": tensor.dtype,
            "device": f"{tensor.device.type}, number {seen.setdefault(tensor.device, len(seen))}",
        }
        for name, tensor in named.items()
    }


def _planned(named: Mapping[str, Tensor], cap_bytes: int) -> list[_Bucket]:
    """Buckets of at most ``cap_bytes``, or of one tensor. It depends only on what `_described` has."""
    buckets: list[_Bucket] = []
    filling: dict[torch.device, _Bucket] = {}
    for name, tensor in named.items():
        nbytes = tensor.numel() * tensor.itemsize
        if not nbytes:
            continue
        bucket = filling.get(tensor.device)
        if bucket is None or bucket.nbytes + nbytes > cap_bytes:
            bucket = filling[tensor.device] = _Bucket(tensor.device, [])
            buckets.append(bucket)
        bucket.parts.append(_Part(name, tensor, bucket.nbytes))
        bucket.nbytes += -(-nbytes // ALIGNED) * ALIGNED
    return buckets


def _views(bucket: _Bucket, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The bucket's tensors, each with its stretch of the buffer seen as a tensor of the same shape and dtype."""
    for _, tensor, offset in bucket.parts:
        stretch = flat[offset : offset + tensor.numel() * tensor.itemsize]
        yield tensor, stretch.view(tensor.dtype).view(tensor.shape)


@torch.no_grad()
def _fill(bucket: _Bucket, flat: Tensor) -> None:
    with _torch.DisableTorchFunctionSubclass():
        for tensor, stretch in _views(bucket, flat):
            stretch.copy_(tensor)


@torch.no_grad()
def _arrive(machines: Machines, bucket: _Bucket, launched: PendingResult) -> None:
    """Waits for a bucket, and writes it into its tensors."""
    arrived = launched.wait()
    if machines.rank == 0:
        return
    with _torch.DisableTorchFunctionSubclass():
        for tensor, stretch in _views(bucket, arrived):
            # Repeated elements, as `expand` makes them, are one element of memory.
            repeated = [step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
            for dim in [dim for dim, is_repeated in enumerate(repeated) if is_repeated]:
                tensor, stretch = tensor.narrow(dim, 0, 1), stretch.narrow(dim, 0, 1)
            tensor.copy_(stretch)
