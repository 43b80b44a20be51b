"""Selects the transport of a call: it collects the facts, and ``choice`` decides.

A transport that not every machine has is compared with plain copies before its first use; nothing else is moved here.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from dataparallel.comm import kernels, nccl, settings
from dataparallel.comm.buckets import DEFAULT_CAP_BYTES
from dataparallel.comm.choice import Choice, Collective, choose, pieces
from dataparallel.comm.cupy import Cupy
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.links import links_between, peers_are_checked, untrusted_pairs
from dataparallel.comm.routes import STAR, TorchCopies
from dataparallel.comm.settings import Settings
from dataparallel.comm.transport import Transport, summed_in
from dataparallel.forks import in_forked_child

_CHECKED_BYTES = 2**16 + 1
"""The size of the buffers by which a transport is compared with plain copies; no round number."""

_HOST = ThroughHost()
_CUPY = Cupy()

_COMPARED: dict[str, Transport] = {"nccl": nccl.Nccl(sums=False), "cupy": _CUPY}
"""The transports that are compared with plain copies before their first use."""

_ADDS_IN_SLOT_ORDER = frozenset({"cupy"})
"""Those of them whose sums must have the bits of plain copies. NCCL adds in an order of its own."""

_comparisons: dict[tuple[str, tuple[torch.device, ...]], str | None] = {}
"""For each transport and devices that have been compared: ``None``, or why the transport is not used there."""


def transport_for(
    work: Collective, devices: Sequence[torch.device], tensors: Sequence[Tensor], cap_bytes: int = sys.maxsize
) -> Transport:
    """The transport for a call between ``devices``; ``tensors``: what each receives in a broadcast, or brings to a sum.

    Raises:
        ValueError: a transport that was asked for can do nothing between these devices, or an environment variable
            names an unknown transport or route.
    """
    if len({*devices}) < 2:
        return STAR
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
    nbytes = max(min(sum(sizes), cap_bytes), *sizes, 0)  # a larger tensor is a bucket of its own
    widened = bool(tensors) and summed_in(tensors[0].dtype) != tensors[0].dtype
    return _select(work, tuple(devices), _rounded(nbytes), widened, settings.current(), peers_are_checked())


def _rounded(nbytes: int) -> int:
    """Three binary digits and zeros, rounded up, so that a program has few different calls."""
    zeros = max(0, nbytes.bit_length() - 3)
    return -(-nbytes >> zeros) << zeros


@lru_cache(maxsize=4096)
def _select(
    work: Collective, devices: tuple[torch.device, ...], nbytes: int, widened: bool, asked: Settings, check_peers: bool
) -> Transport:
    """The transport for ``nbytes`` bytes. ``widened``: sums are of 16-bit floats."""
    untrusted = untrusted_pairs(devices) if check_peers else []
    links = links_between(devices)
    choice = choose(work, devices, nbytes, asked, _why_unavailable(asked.transport, devices), untrusted, links, widened)
    if choice.transport in _COMPARED:
        problem = why_dropped(choice.transport, _COMPARED[choice.transport], tuple(dict.fromkeys(devices)))
        if problem is not None:
            choice = choose(work, devices, nbytes, asked, problem, untrusted, links, widened)
    if choice.transport == "nccl":
        return nccl.Nccl(sums=not asked.deterministic)
    if choice.transport == "cupy":
        return _CUPY
    if choice.transport == "host":
        return _HOST
    if choice.route == "chain":
        assert work in ("broadcast", "reduce_add")
        return TorchCopies("chain", pieces(work, len({*devices}), nbytes, links, widened))
    return TorchCopies(choice.route)


def choose_transport(devices: Sequence[torch.device], work: Collective = "broadcast") -> Choice:
    """The transport and the route that a bucket of parameters would take between ``devices``, and the reason.

    Nothing is copied for it, CuPy is not imported, and CUDA is not asked which devices are peers.

    Raises:
        ValueError: a transport that was asked for can do nothing between these devices, or is unknown. Only a call
            finds out that two devices are not peers.
    """
    asked = settings.current()
    links = links_between(devices)
    return choose(work, devices, DEFAULT_CAP_BYTES, asked, _why_unavailable(asked.transport), (), links)


@lru_cache(maxsize=256)
def _why_unavailable(asked: str | None, devices: tuple[torch.device, ...] | None = None) -> str | None:
    """Why the transport that was asked for is not available; ``None`` if it is.

    Without ``devices`` CuPy is not imported, and CUDA is not asked which devices are peers.
    """
    if asked == "nccl":
        return nccl.why_not()
    if asked == "cupy":
        return kernels.why_not_installed() if devices is None else kernels.why_not(devices)
    return None


def why_dropped(name: str, transport: Transport, devices: tuple[torch.device, ...]) -> str | None:
    """How the transport's results differ from those of plain copies between these devices; ``None`` if they do not.

    The first call for a transport and devices compares, and warns (``RuntimeWarning``) if the results differ.
    """
    key = name, devices
    if key not in _comparisons:
        problem = _wrong_copies(transport, devices)
        if problem is None and name in _ADDS_IN_SLOT_ORDER:
            problem = wrong_sums(transport.add_up, devices)
        _comparisons[key] = problem
        if problem is not None:
            warnings.warn(
                f"the transport {name!r} is not used between {', '.join(map(str, devices))}: {problem}",
                RuntimeWarning,
                stacklevel=2,
            )
    return _comparisons[key]


@torch.no_grad()
def _wrong_copies(transport: Transport, devices: tuple[torch.device, ...]) -> str | None:
    # os.urandom leaves torch's generators, and so the user's random state, as they are.
    data = torch.frombuffer(bytearray(os.urandom(_CHECKED_BYTES)), dtype=torch.uint8)
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

# A build that flushes subnormals to zero, or that rounds at another point, copies all data right and adds ordinary
# numbers right. So this adds numbers at the edges of each floating-point dtype to each other.

AddUp: TypeAlias = "Callable[[Sequence[Tensor], torch.device], Tensor]"
"""Adds flat buffers of one dtype, one on each device, in the order given. The second argument is the sum's device."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@torch.no_grad()
def wrong_sums(add_up: AddUp, devices: Sequence[torch.device]) -> str | None:
    """How sums by ``add_up`` differ from those of plain copies, in words; ``None`` if they do not.

    ``add_up`` adds one buffer on each of ``devices``; the sum is on the first.
    """
    for dtype in _DTYPES:
        # Both may overwrite their terms, so each gets new ones.
        expected = STAR.add_up(_terms(dtype, devices), devices[0]).cpu()
        try:
            found = add_up(_terms(dtype, devices), devices[0]).cpu()
        except RuntimeError as error:
            return f"it has failed to add: {error}"
        wrong = _differ(found, expected).nonzero().flatten().tolist()
        if wrong:
            terms = [float(term[wrong[0]]) for term in _terms(dtype, devices)]
            return (
                f"in {dtype} it has made {float(found[wrong[0]])} of {' + '.join(map(str, terms))}, "
                f"which are {float(expected[wrong[0]])}"
            )
    return None


def _terms(dtype: torch.dtype, devices: Sequence[torch.device]) -> list[Tensor]:
    """A buffer for each device. Those of the first two devices pair each number with each number.

    In the first half of the buffers the other devices add nothing. In the second half they subtract the first two
    terms again: that shows rounding and overflow in between.
    """
    info = torch.finfo(dtype)
    normal, subnormal = info.smallest_normal, info.smallest_normal * info.eps
    sizes = [0.0, subnormal, 3 * subnormal, normal - subnormal, normal, info.eps / 2, 1.0, 1 + info.eps, info.max]
    edges = [sign * size for size in (*sizes, float("inf")) for sign in (1, -1)]
    numbers = torch.tensor([*edges, float("nan")], dtype=torch.float64, device="cpu")
    first, second = numbers.repeat(len(numbers)), numbers.repeat_interleave(len(numbers))
    nothing = torch.full_like(first, -0.0)  # x + -0 is x, also where x is -0
    meeting, returning = (first, second, nothing), (first, second, -first, -second)
    return [
        torch.cat([meeting[min(place, 2)], returning[place % 4]]).to(dtype).to(device)
        for place, device in enumerate(devices)
    ]


def _differ(found: Tensor, expected: Tensor) -> Tensor:
    """True where bits differ. Two NaNs are equal here: the device chooses their bits."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[found.itemsize]
    return (found.view(bits) != expected.view(bits)) & ~(found.isnan() & expected.isnan())


@in_forked_child
def forget() -> None:
    """Forgets all answers: a forked child, and a test that changes what is available, asks again."""
    _comparisons.clear()
    _select.cache_clear()
    _why_unavailable.cache_clear()
