"""How a run of several ranks has ended: the results of all ranks, a skip, or one error that says what each rank did.

Threads and processes tell it in the same words. It neither starts nor stops anything.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import traceback
import unittest
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

from dataparallel.testing.ranks.rank import Place

How = Literal["returned", "raised", "skipped", "xfailed", "died", "stopped"]

# The files that call a test in a rank.
CALLERS = (str(Path(__file__).parent) + os.sep, str(Path(unittest.__file__).parent) + os.sep, contextlib.__file__)

TAIL = 8 * 1024  # characters of a rank's output that a report shows
STACKS = 32 * 1024


class RanksFailed(AssertionError):
    """A test has failed in one rank or more.

    Attributes:
        rank: the number of the rank that failed first, or that did not end.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass
class Ended:
    """How one rank has ended.

    Attributes:
        number: the rank.
        how: "raised" for an exception, "died" for a process that ended without a word, "stopped" for a rank that had
            to be stopped, or was released, after another one had failed.
        what: the end of a sentence that begins with "rank 1".
        at: seconds, on the clock `time.monotonic`.
        result: what the function has returned.
        trace: the traceback of an exception.
        output: the end of what a process has written.
        stacks: of a rank that had to be stopped, what its threads did then.
        imported: what a process has imported that takes long, so that it is there when the next ranks are forked.
    """

    number: int
    how: How
    what: str = "returned"
    at: float = 0.0
    result: Any = None
    trace: str = ""
    output: str = ""
    stacks: str = ""
    imported: list[str] = field(default_factory=list)


def describe(number: int, error: BaseException, at: float) -> Ended:
    """What an exception means that the function of a test has raised; pytest's outcomes are known if pytest is."""
    skipped: tuple[type[BaseException], ...] = (unittest.SkipTest,)
    xfailed: tuple[type[BaseException], ...] = ()
    if "pytest" in sys.modules:
        import pytest

        skipped += (pytest.skip.Exception,)
        xfailed += (pytest.xfail.Exception,)
    if isinstance(error, skipped):
        return Ended(number, "skipped", str(error), at)
    if isinstance(error, xfailed):
        return Ended(number, "xfailed", str(error), at)
    if isinstance(error, SystemExit):
        what = f"left with exit code {_code(error)}, by SystemExit"
    else:
        what = f"raised {type(error).__name__}: {error}" if str(error) else f"raised {type(error).__name__}"
    return Ended(number, "raised", what, at, trace=trace(error))


def _code(error: SystemExit) -> int:
    """The exit code that Python makes of it: text counts as 1."""
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def trace(error: BaseException) -> str:
    """The traceback from the test's own code on: who called it is of no interest."""
    below: TracebackType | None = error.__traceback__
    while below is not None and below.tb_frame.f_code.co_filename.startswith(CALLERS):
        below = below.tb_next
    return "".join(traceback.format_exception(type(error), error, below or error.__traceback__))


def conclude(place: Place, ended: list[Ended], seconds: float) -> list[Any]:
    """The results in the order of ranks.

    Raises:
        unittest.SkipTest: if the first rank that did not return has skipped the test. The others then had nobody to
            talk to, so their errors count for nothing.
        RanksFailed: if it has failed.
    """
    __tracebackhide__ = True
    others = [end for end in ended if end.how != "returned"]
    if not others:
        return [end.result for end in sorted(ended, key=lambda end: end.number)]
    reason = min(others, key=_order)
    if reason.how == "skipped":
        raise unittest.SkipTest(reason.what)
    if reason.how == "xfailed":
        _xfail(reason.what)
    raise RanksFailed(_report(place, ended, reason, seconds), reason.number)


def _order(end: Ended) -> tuple[bool, bool, float, int]:
    """The reason comes first.

    A death without a word is one, even if its peers' errors seem to be earlier: a dying process closes its connections
    before its death is known.
    """
    return (end.how == "stopped", end.how != "died", end.at, end.number)


def _xfail(what: str) -> NoReturn:
    import pytest

    pytest.xfail(what)


def _report(place: Place, ended: list[Ended], reason: Ended, seconds: float) -> str:
    alike = [end.number for end in ended if end.how == "died" and end.what == reason.what] or [reason.number]
    ranks = f"{'ranks' if len(alike) > 1 else 'rank'} {', '.join(map(str, alike))} of {len(ended)}"
    lines = [f"{ranks} ({place}) {_first_line(reason.what)}, after {seconds:.1f} s"]
    told: dict[str, int] = {}
    for end in sorted(ended, key=lambda end: (end is not reason, end.number)):
        parts = [_first_line(end.what) if end.trace else end.what]
        parts += _part("", end.trace, STACKS)
        parts += _part("all stacks:", end.stacks, STACKS)
        parts += _part("output:", end.output, TAIL)
        text = "\n".join(parts)
        if len(parts) > 1 and text in told:
            text = f"the same as rank {told[text]}"
        told.setdefault(text, end.number)
        lines += ["", f"rank {end.number}: {text}"]
    return "\n".join(lines)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _part(title: str, text: str, limit: int) -> list[str]:
    text = text.strip("\n")
    if not text:
        return []
    if len(text) > limit:
        text = f"[...]\n{text[-limit:]}"
    return [*([f"  {title}"] if title else []), textwrap.indent(text, "    ")]
