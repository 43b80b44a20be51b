"""Checks that a transport's sums have the bits of plain copies' sums, before it is trusted with gradients.

A build that flushes subnormals to zero, or that rounds at another point, copies all data right and adds ordinary
numbers right. So this adds numbers at the edges of each floating-point dtype to each other. ``comm.select`` calls it
before the first use of a transport, and decides what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dataparallel.comm.routes import STAR

__all__ = ["AddUp", "wrong_sums"]

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
