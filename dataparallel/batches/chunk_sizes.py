"""`Split` checks the argument ``chunk_sizes=`` and says how many samples of a batch each slot gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from dataparallel.arguments import listed
from dataparallel.comm.checks import check_chunk_sizes, near_equal_sizes

ChunkSizes: TypeAlias = "Sequence[float] | None"
"""What users pass: ints are numbers of samples; with a float among them they are shares."""


class Split:
    """Splits every batch alike: by numbers of samples, by shares, or into near-equal chunks for ``None``.

    ``given``: the user's ``chunk_sizes``; a sequence is kept as a tuple, so that users assign it and cannot change it
    in place. ``slots``: how many; ``None`` if it is not known yet.
    """

    def __init__(self, given: ChunkSizes, slots: int | None = None) -> None:
        self.given = None if given is None else _checked(given, slots)

    def sizes(self, total: int, slots: int) -> list[int]:
        """Returns the sizes of the chunks of ``total`` samples, at least 1 each. There may be fewer than slots."""
        if self.given is None:
            return near_equal_sizes(total, slots)
        samples = [number for number in self.given if isinstance(number, int)]
        if len(samples) == len(self.given):
            return check_chunk_sizes(samples, slots, total)
        _check_length(self.given, slots)
        return split_by_shares(total, self.given)


def _checked(given: Any, slots: int | None) -> tuple[float, ...]:
    what = (
        "; pass a number of samples for each slot (ints), a share for each slot (floats), or None for near-equal "
        "chunks, and leave slots without samples out of device_ids"
    )
    numbers = listed("chunk_sizes", given, float, what, above=0)
    if slots is not None:
        _check_length(numbers, slots)
    if not numbers:
        raise ValueError(f"chunk_sizes={given!r} has no entry{what}")
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"chunk_sizes={numbers}: a share is a finite number")
    return tuple(numbers)


def split_by_shares(total: int, shares: Sequence[float]) -> list[int]:
    """Splits ``total`` samples in the ratio of ``shares``, by largest remainders.

    Each slot gets its quota rounded down. The samples that are left go to the slots whose quotas have lost most, lower
    slots first. A slot gets at least one sample, and of two slots the one with the larger share gets no fewer samples.
    With fewer samples than slots, the first slots get one each. The arithmetic is exact, so all machines agree.

    Source: the method of Hamilton, M. Balinski and H. P. Young, Fair Representation, 1982.
    """
    if total < len(shares):
        return near_equal_sizes(total, len(shares))
    exact = [Fraction(share) for share in shares]
    whole = sum(exact)
    quotas = [total * share / whole for share in exact]
    sizes = [max(1, math.floor(quota)) for quota in quotas]
    slots = range(len(shares))
    while (left := total - sum(sizes)) > 0:
        # Fewer than there are slots: each slot gets one of them at most.
        for slot in sorted(slots, key=lambda i: (sizes[i] - quotas[i], i))[:left]:
            sizes[slot] += 1
    while sum(sizes) > total:  # small shares were rounded up to one sample, and others make room for them
        slot = max((i for i in slots if sizes[i] > 1), key=lambda i: (sizes[i] - quotas[i], i))
        sizes[slot] -= 1
    return sizes


def _check_length(given: Sequence[float], slots: int) -> None:
    if len(given) != slots:
        raise ValueError(f"chunk_sizes={list(given)} has {len(given)} entries for {slots} slots; pass one for each")
