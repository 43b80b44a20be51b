"""`Health`: whether the ranks of a group can still talk to each other, and the error if not.

All lines over one group share one, because they share what sends their tensors: after a collective that one rank has
not issued, nothing can be paired any more. What ends a wait:

- what is waited for, or torch's own error for it;
- a failure that any thread of this rank has seen: the group is *broken* then, and every wait raises the same sentence,
  now and later;
- a failure that another rank has told (``board``);
- the group's timeout and three seconds, whatever torch does.

``line`` and the waits in ``rounds`` call this file.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from torch import distributed

from dataparallel.machines.agreement import in_words
from dataparallel.machines.backend import Group
from dataparallel.machines.board import LATE, Board
from dataparallel.machines.errors import MachinesError, PeerFailed, PeerGone, again
from dataparallel.machines.launcher import AT_EXIT, Launcher

if TYPE_CHECKING:
    from dataparallel.machines.line import Line

__all__ = ["Health", "is_of_network", "told"]

MARGIN = 3.0
"""Seconds that a wait lasts longer than the group's timeout, so that torch can say its own words first."""

RESTART = "Start all processes again, from a checkpoint"

TELLING = 2.0
"""Seconds that a failure here waits until the others can know of it."""


class Health:
    """The state of a group. Any thread may use it.

    Attributes:
        process: the id of the process that is a rank.
        broken: why the group cannot be used any more, if so.
        board: of the group.
        launcher: of the process.
    """

    def __init__(self, group: Group, launcher: Launcher) -> None:
        self.launcher = launcher
        launcher.include(self)
        self.process = os.getpid()
        self.broken: MachinesError | None = None
        self.board = Board(group)
        self._group = group
        self._name = group.names([group.rank])
        self._lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet([group])

    def include_group(self, group: Group) -> None:
        """``group`` refers to torch's group, and gives it up when the interpreter ends."""
        self._groups.add(group)

    def include(self, line: Line) -> None:
        """This line ends, too, when the group is broken."""
        self._lines.add(line)

    @property
    def is_closed(self) -> bool:
        """True if the interpreter ends."""
        return self.launcher.is_closed

    def close(self) -> None:
        """The interpreter ends: what has not been issued is dropped, and what is to be told is told."""
        if self.process == os.getpid():
            for line in [*self._lines]:
                line.drop_all(MachinesError("the launcher was closed before the end of the round"))
            self.board.close(AT_EXIT)

    def let_go(self) -> None:
        """Frees torch's groups, whose threads end then. A broken one stays: its threads might wait for its timeout."""
        if self.process == os.getpid() and self.broken is None:
            for line in [*self._lines]:
                line.disconnect()
            for group in [*self._groups]:
                del group.group

    def look(self, wait: object, what: str, seconds: float) -> None:
        """Called several times a second by a wait that has lasted so long; raises if it is over."""
        if self.broken is not None:
            raise again(self.broken)
        if self.is_closed:
            raise MachinesError(f"the launcher was closed while something waited for {what}")
        if seconds > LATE:
            self.board.note_wait(wait, what)
        if self.board.broken is not None:
            raise again(self.break_by(told(self.board.broken, f"{self._name} has waited for {what}. ")))
        if seconds > self._group.timeout + MARGIN:
            late = TimeoutError(f"nothing has come within the group's timeout of {self._group.timeout:g} s")
            raise again(self.break_because(late, what))

    def break_because(self, error: BaseException, what: str) -> MachinesError:
        """Breaks the group because a peer is gone. Returns the error of the first failure."""
        if self.broken is not None:
            return self.broken
        self.board.note_wait(error, what)
        said = self.board.words_of_others()
        if self.board.broken is not None:  # another rank knows more
            return self.break_by(told(self.board.broken, f"{self._name} has waited for {what}. "))
        names = self._group.names
        waits = [f"{names([rank])} for {word['waits']}" for rank, word in sorted(said.items()) if word["waits"]]
        failed = [f"{names([rank])} {word['failed']}" for rank, word in sorted(said.items()) if word["failed"]]
        silent = [rank for rank in range(self._group.size) if rank != self._group.rank and rank not in said]
        text = f"{self._name} has waited for {what}, and nothing comes any more: {in_words(error)}. "
        if waits:
            text += f"Others wait too: {', '.join(waits)}. "
        if failed:
            text += f"Others have failed: {', '.join(failed)}. "
        if silent:
            text += f"No word from {names(silent)}. "
        text += "A process has ended or hangs, or the ranks do not run the same number of steps"
        self.board.tell_broken({"kind": "gone", "rank": self._name, "text": text})
        gone = PeerGone(f"{text}. {RESTART}")
        gone.__cause__ = error
        return self.break_by(gone)

    def break_here(self, error: BaseException, what: str) -> None:
        """A collective or a hook has raised on this rank: the others have sent what gets no partner any more.

        They are told before anybody here knows, who may end this process.
        """
        reason = {"kind": "failed", "rank": self._name, "text": f"{self._name} failed in {what}: {in_words(error)}"}
        self.board.tell_broken(reason)
        self.board.wait_until_told(TELLING)
        self.break_by(told(reason))

    def break_by(self, error: MachinesError) -> MachinesError:
        """Breaks the group with this error, unless it is broken. Returns the error of the first failure."""
        if self.broken is None:
            self.broken = error
        for line in [*self._lines]:
            line.drop_all(self.broken)
        return self.broken


def told(reason: dict[str, Any], before: str = "") -> MachinesError:
    """The error for a reason that a rank has put on the board."""
    if reason["kind"] == "failed":
        return PeerFailed(f"{before}{reason['text']}. What the others have sent gets no partner any more. {RESTART}")
    return PeerGone(f"{before}{reason['rank']} has told why nothing comes any more: {reason['text']}. {RESTART}")


def is_of_network(error: BaseException) -> bool:
    """True if torch or gloo has raised it because a peer is gone or late."""
    said = str(error)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL each collective begins with a monitored barrier.
    return isinstance(error, distributed.DistError) or "/gloo/" in said or "monitoredBarrier" in said
