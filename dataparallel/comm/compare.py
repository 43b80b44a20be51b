"""`why_unusable`: compares a transport with torch's plain copies between the same devices, before its first use there.

Copies have to bring the same data. Sums of a transport that adds in slot order have to have the same bits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dataparallel.comm.routes import STAR
from dataparallel.comm.transport import Transport

_COMPARED_BYTES = 2**16 + 1
"""The size of the buffers that are copied; no round number."""

_ADDS_IN_SLOT_ORDER = frozenset({"cupy"})
"""Transports whose sums must have the bits of plain copies. NCCL adds in an order of its own."""

_results: dict[tuple[str, tuple[torch.device, ...]], str | None] = {}
"""For each transport and devices that have been compared: ``None``, or why the transport is not used there."""


def why_unusable(name: str, transport: Transport, devices: tuple[torch.device, ...]) -> str | None:
    """How the transport's results differ from those of plain copies between these devices; ``None`` if they do not.

    Only the first call for a transport and devices copies. It warns (``RuntimeWarning``) if the results differ.
    """
    key = name, devices
    if key not in _results:
        problem = how_copies_differ(transport, devices)
        if problem is None and name in _ADDS_IN_SLOT_ORDER:
            problem = how_sums_differ(transport.add_up, devices)
        _results[key] = problem
        if problem is not None:
            warnings.warn(
                f"the transport {name!r} is not used between {', '.join(map(str, devices))}: {problem}",
                RuntimeWarning,
                stacklevel=2,
            )
    return _results[key]


@torch.no_grad()
def how_copies_differ(transport: Transport, devices: Sequence[torch.device]) -> str | None:
    """How a broadcast by ``transport`` from the first device differs from a plain copy, in words, or ``None``."""
    # os.urandom leaves torch's generators, and so the user's random state, as they are.
    data = torch.frombuffer(bytearray(os.urandom(_COMPARED_BYTES)), dtype=torch.uint8)
    source = data.to(devices[0])
    buffers = [data.bitwise_not().to(device) for device in devices[1:]]
    try:
        transport.broadcast_flat(source, buffers)
        for buffer in buffers:
            if not torch.equal(buffer.cpu(), data):
                return f"it brought other data to {buffer.device} than plain copies do"
    except RuntimeError as error:
        return f"it has failed: {error}"
    return None


# ---- sums, compared to the bit ---------------------------------------------------------------------------------------

# A build that flushes subnormals to zero, or that rounds at another point, still copies data and adds ordinary numbers
# correctly. So the comparison adds numbers from the edges of each floating-point dtype to each other.

AddUp: TypeAlias = "Callable[[Sequence[Tensor], torch.device], Tensor]"
"""Adds flat buffers of one dtype, one on each device, in the order given. The second argument is the sum's device."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@torch.no_grad()
def how_sums_differ(add_up: AddUp, devices: Sequence[torch.device]) -> str | None:
    """How sums by ``add_up`` differ from sums by plain copies, in words, or ``None``.

    Each of ``devices`` brings one buffer; the sum is on the first device.
    """
    for dtype in _DTYPES:
        # A sum may overwrite its terms, so each of the two sums gets new terms.
        expected = STAR.add_up(_terms(dtype, devices), devices[0]).cpu()
        try:
            actual = add_up(_terms(dtype, devices), devices[0]).cpu()
        except RuntimeError as error:
            return f"it has failed to add: {error}"
        differing = _differ(actual, expected).nonzero().flatten().tolist()
        if differing:
            at = differing[0]
            terms = [float(term[at]) for term in _terms(dtype, devices)]
            return (
                f"in {dtype} it has made {float(actual[at])} of {' + '.join(map(str, terms))}, "
                f"which are {float(expected[at])}"
            )
    return None


def _terms(dtype: torch.dtype, devices: Sequence[torch.device]) -> list[Tensor]:
    """A buffer for each device. The buffers of the first two devices pair each number with each number.

    In the first half of the buffers the other devices add nothing. In the second half they subtract the first two
    terms again, which shows how a partial sum was rounded and whether it overflowed.
    """
    info = torch.finfo(dtype)
    normal, subnormal = info.smallest_normal, info.smallest_normal * info.eps
    sizes = [0.0, subnormal, 3 * subnormal, normal - subnormal, normal, info.eps / 2, 1.0, 1 + info.eps, info.max]
    edges = [sign * size for size in (*sizes, float("inf")) for sign in (1, -1)]
    numbers = torch.tensor([*edges, float("nan")], dtype=torch.float64, device="cpu")
    first, second = numbers.repeat(len(numbers)), numbers.repeat_interleave(len(numbers))
    zeros = torch.full_like(first, -0.0)  # x + -0 is x, also where x is -0
    adding_nothing, subtracting = (first, second, zeros), (first, second, -first, -second)
    return [
        torch.cat([adding_nothing[min(place, 2)], subtracting[place % 4]]).to(dtype).to(device)
        for place, device in enumerate(devices)
    ]


def _differ(actual: Tensor, expected: Tensor) -> Tensor:
    """True where bits differ. Two NaNs are equal here: the device chooses their bits."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[actual.itemsize]
    return (actual.view(bits) != expected.view(bits)) & ~(actual.isnan() & expected.isnan())


def forget() -> None:
    """Forgets all results. ``select.forget`` calls it."""
    _results.clear()
