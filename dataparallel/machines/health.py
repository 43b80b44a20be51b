"""`Health`: whether the ranks of a group can still talk to each other, and the error if not. Every wait asks it.

A wait ends with what it waits for, with a failure here or on another rank, which break the group for good, and three
seconds after the group's timeout, whatever torch does.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.futures import Future

from dataparallel.machines.errors import MachinesError, PeerFailed, PeerGone, again, in_words
from dataparallel.machines.notices import LATE, Notices

if TYPE_CHECKING:
    from dataparallel.machines.group import Group
    from dataparallel.machines.launcher import Launcher
    from dataparallel.machines.round_queue import RoundQueue

SLICE = 0.2
"""Seconds. A wait asks this often whether it is over for another reason."""

TELLING = 2.0
"""Seconds that a failure here waits until the others can know of it."""

MARGIN = 3.0
"""Seconds that a wait lasts longer than the group's timeout, so that torch can say its own words first."""

AT_EXIT = 1.0
"""Seconds that the end of the interpreter waits for a thread."""

RESTART = "Start all processes again, from a checkpoint"

Check = Callable[[], object]
"""Raises if there is no use in waiting on."""


def wait_for_event(event: threading.Event, check: Check) -> None:
    """Until another thread sets the event, or ``check`` raises."""
    while not event.wait(SLICE):
        check()


def wait_for_future(future: Future[Any], check: Check) -> None:
    """Until the future has a value or an error, or ``check`` raises."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    wait_for_event(done, check)


class Health:
    """The state of the groups that send for the same ranks. Any thread may use it.

    All queues over them share one: after a collective that one rank has not issued, nothing can be paired any more.

    Attributes:
        process: the id of the process that is a rank.
        broken: why the group cannot be used any more, if so.
        notices: of the ranks.
        launcher: of the process.
    """

    def __init__(self, group: Group, launcher: Launcher) -> None:
        self.launcher = launcher
        launcher.include(self)
        self.process = os.getpid()
        self.broken: MachinesError | None = None
        self.notices = Notices(group)
        self.group = group
        self.name = group.names([group.rank])
        self._queues: weakref.WeakSet[RoundQueue] = weakref.WeakSet()
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet([group])

    def include_group(self, group: Group) -> None:
        """``group`` refers to torch's group, and gives it up when the interpreter ends."""
        self._groups.add(group)

    def include(self, queue: RoundQueue) -> None:
        """This queue ends, too, when the group is broken."""
        self._queues.add(queue)

    @property
    def is_closed(self) -> bool:
        """True if the interpreter ends."""
        return self.launcher.is_closed

    def check_process(self) -> None:
        """Raises in a forked child. Called before a lock is taken, which a thread of the parent may hold for ever."""
        if self.process != os.getpid():
            raise MachinesError(
                "this process was forked from one that is a rank of the process group, and is no rank itself: let the "
                "children of a rank, a DataLoader's workers for example, call no module that spans machines"
            )

    def close(self) -> None:
        """The interpreter ends: what has not been issued is dropped, and what is to be told is told."""
        if self.process == os.getpid():
            for each in [*self._queues]:
                each.drop_all(MachinesError("the launcher was closed before the end of the round"))
            self.notices.close(AT_EXIT)

    def let_go(self) -> None:
        """Frees torch's groups, whose threads end then. A broken one stays: its threads might wait for its timeout."""
        if self.process == os.getpid() and self.broken is None:
            for each in [*self._queues]:
                each.disconnect()
            for group in [*self._groups]:
                del group.group

    def break_because(self, error: BaseException, what: str) -> MachinesError:
        """Breaks the group because a peer is gone. Returns the error of the first failure."""
        if self.broken is not None:
            return self.broken
        self.notices.note_wait(error, what)
        said = self.notices.words_of_others()
        if self.notices.broken is not None:  # another rank knows more
            return self.break_by(self.told(what))
        names = self.group.names
        waits = [f"{names([rank])} for {word['waits']}" for rank, word in sorted(said.items()) if word["waits"]]
        failed = [f"{names([rank])} {word['failed']}" for rank, word in sorted(said.items()) if word["failed"]]
        silent = [rank for rank in range(self.group.size) if rank != self.group.rank and rank not in said]
        text = f"{self.name} has waited for {what}, and nothing comes any more: {in_words(error)}. "
        if waits:
            text += f"Others wait too: {', '.join(waits)}. "
        if failed:
            text += f"Others have failed: {', '.join(failed)}. "
        if silent:
            text += f"No word from {names(silent)}. "
        text += "A process has ended or hangs, or the ranks do not run the same number of steps"
        self.notices.tell_broken({"kind": "gone", "rank": self.name, "text": text})
        gone = PeerGone(f"{text}. {RESTART}")
        gone.__cause__ = error
        return self.break_by(gone)

    def break_here(self, error: BaseException, what: str) -> None:
        """A collective or a hook has raised on this rank: the others have sent what gets no partner any more.

        They are told before anybody here knows, who may end this process.
        """
        reason = {"kind": "failed", "rank": self.name, "text": f"{self.name} failed in {what}: {in_words(error)}"}
        self.notices.tell_broken(reason)
        self.notices.wait_until_told(TELLING)
        self.break_by(_error_of(reason))

    def break_by(self, error: MachinesError) -> MachinesError:
        """Breaks the group with this error, unless it is broken. Returns the error of the first failure."""
        if self.broken is None:
            self.broken = error
        for each in [*self._queues]:
            each.drop_all(self.broken)
        return self.broken

    def told(self, what: str) -> MachinesError:
        """The error for the reason that another rank has given, while this one has waited for ``what``."""
        assert self.notices.broken is not None
        return _error_of(self.notices.broken, f"{self.name} has waited for {what}. ")


class Watch:
    """The check of one wait: it tells others that the wait lasts, and raises when there is no use in it any more."""

    def __init__(self, health: Health, what: str) -> None:
        self._health, self._what, self._began = health, what, time.monotonic()
        self._is_told = False

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_told:
            self._health.notices.forget_wait(self)

    def __call__(self) -> None:
        """Called several times a second."""
        health, what, seconds = self._health, self._what, time.monotonic() - self._began
        if health.broken is not None:
            raise again(health.broken)
        if health.is_closed:
            raise MachinesError(f"the launcher was closed while something waited for {what}")
        if seconds > LATE:
            self._is_told = True
            health.notices.note_wait(self, what)
        if health.notices.broken is not None:
            raise again(health.break_by(health.told(what)))
        if seconds > health.group.timeout + MARGIN:
            late = TimeoutError(f"nothing has come within the group's timeout of {health.group.timeout:g} s")
            raise again(health.break_because(late, what))


def is_of_network(error: BaseException) -> bool:
    """True if torch or gloo has raised it because a peer is gone or late."""
    said = str(error)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL each collective begins with a monitored barrier.
    return isinstance(error, distributed.DistError) or "/gloo/" in said or "monitoredBarrier" in said


def _error_of(reason: dict[str, Any], before: str = "") -> MachinesError:
    """The error for a reason that a rank has told."""
    if reason["kind"] == "failed":
        return PeerFailed(f"{before}{reason['text']}. What the others have sent gets no partner any more. {RESTART}")
    return PeerGone(f"{before}{reason['rank']} has told why nothing comes any more: {reason['text']}. {RESTART}")
