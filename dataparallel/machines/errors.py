"""`MachinesError` and its subclasses: the errors of a group of machines. `differences` and `of_ranks` word them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

MOST = 20
"""How many differences a message lists."""


class MachinesError(RuntimeError):
    """Something has failed between machines."""


class PeerGone(MachinesError):
    """A rank has ended, hangs, or did not come within the group's timeout. This ends the group."""


class PeerFailed(MachinesError):
    """A rank has failed in a step. The message contains the error of that rank. This ends the group."""


class MachinesDiffer(MachinesError):
    """Ranks are about to do different things, and no result is used. In a step this ends the group."""


def copy_error(error: E) -> E:
    """A copy of the error for another thread to raise: threads that raise one object would mix their tracebacks."""
    return type(error)(*error.args) if isinstance(error, MachinesError) else error


def describe_error(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def differences(texts: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """The lines that not all ranks have, with those that have them, or how their order differs: at most `MOST`."""
    of_rank = [text.split("\n") for text in texts]
    having: dict[str, list[int]] = {}
    for rank, lines in zip(ranks, of_rank, strict=True):
        for line in {*lines}:
            having.setdefault(line, []).append(rank)
    parts = [f"{line} on {of_ranks(on)}" for line, on in sorted(having.items()) if len(on) < len(ranks)]
    if not parts and len({*texts}) > 1:
        place = next((i for i, lines in enumerate(zip(*of_rank, strict=False)) if len({*lines}) > 1), 0)
        parts = [f"the order, where number {place} is {of_rank[0][place]} on {of_ranks(ranks[:1])}"]
    return [*parts[:MOST], f"and {len(parts) - MOST} more differences"] if len(parts) > MOST else parts


def of_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0, 5 and 7``."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
