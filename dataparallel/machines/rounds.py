"""`Round` and `Launched`: what the launcher's callers hold.

A round is what all ranks do together, for example one backward: it begins with a text that has to be equal on all
ranks, has collectives in one order, and an end. Its methods may be called by any thread and return at once. Waits are
on `Launched`, and every failure ends them. ``line`` makes rounds and plays them; ``units`` and
``composable`` fill them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dataparallel.machines.agreement import in_words
from dataparallel.machines.board import LATE
from dataparallel.machines.collectives import Transfer
from dataparallel.machines.errors import MachinesError, again
from dataparallel.machines.health import Health
from dataparallel.machines.staging import Staged
from dataparallel.machines.waiting import wait_for_event

if TYPE_CHECKING:
    from dataparallel.machines.line import Line

__all__ = ["Item", "Launched", "Round", "Watch", "check_process"]


class Watch:
    """The check of one wait: it tells the board that the wait lasts, and raises when the group is broken."""

    def __init__(self, health: Health, what: str) -> None:
        self._health, self._what, self._began = health, what, time.monotonic()
        self._is_told = False

    def __call__(self) -> None:
        """Raises if the wait is over."""
        seconds = time.monotonic() - self._began
        self._is_told = self._is_told or seconds > LATE
        self._health.look(self, self._what, seconds)

    def end(self) -> None:
        """Has to be called when the wait has ended."""
        if self._is_told:
            self._health.board.forget_wait(self)


class Launched:
    """Something of a round. `wait` returns its result.

    Attributes:
        what: in words, for messages.
    """

    def __init__(self, what: str, health: Health) -> None:
        self.what = what
        self._health = health
        self._decided = threading.Event()
        self._error: BaseException | None = None
        self._result: Any = None

    def wait(self) -> Any:
        """The result: of a collective its tensor, of a call what it returns, of an end a list of bool.

        A tensor is ready for the calling thread's current stream.

        Raises:
            PeerGone: a rank is gone, or did not come within the group's timeout.
            PeerFailed: a rank has failed in this round.
            MachinesDiffer: the ranks have begun different rounds.
            Exception: what a collective or a call has raised on this rank.
        """
        check_process(self._health)
        watch = Watch(self._health, self.what)
        try:
            wait_for_event(self._decided, watch)
            if self._error is not None:
                raise again(self._error)
            result = self._result
            if isinstance(result, Transfer):
                # The result is taken once: a second wait gets the tensor.
                try:
                    result = self._result = result.wait(watch)
                except MachinesError:
                    raise
                except RuntimeError as error:
                    raise again(self._health.break_because(error, self.what)) from error
            return result
        finally:
            watch.end()

    @property
    def is_decided(self) -> bool:
        """True if it has been issued, or has failed."""
        return self._decided.is_set()

    def has_arrived(self) -> bool:
        """True if `received` does not block, as far as one can tell."""
        return self.is_decided and (not isinstance(self._result, Transfer) or self._result.has_arrived())

    def received(self) -> Staged:
        """What a collective has received, where it was received, for the launcher's thread to send on.

        Raises:
            Exception: as `wait`.
        """
        if self._error is not None:
            raise again(self._error)
        transfer: Transfer = self._result
        return transfer.received()

    def succeed(self, result: Any) -> None:
        """The launcher has issued it, or has its result."""
        self._result = result
        self._decided.set()

    def fail(self, error: BaseException) -> None:
        """The launcher will not issue it, or it has failed."""
        self._error = error
        self._decided.set()


@dataclass
class Item:
    """What a round has to do next.

    Attributes:
        kind: "collective": ``calls`` return a `Transfer` each, and are issued together. A "call" may do anything, and
            "say" returns what this rank says. An "end" has ``used`` and ``failed`` instead, a "close" nothing.
        launched: what the caller holds, one for each of ``calls``.
        after: what has to have arrived before.
    """

    kind: Literal["collective", "call", "say", "end", "close"]
    launched: Sequence[Launched]
    calls: Sequence[Callable[..., Any]] = ()
    after: Sequence[Launched] = ()
    used: Sequence[bool] = ()
    failed: str | None = None

    @property
    def what(self) -> str:
        """In words, for messages."""
        return self.launched[0].what

    def is_ready(self) -> bool:
        """True if this rank can do it."""
        return all(launched.has_arrived() for launched in self.after)


class Round:
    """What all ranks do together. `Launcher.begin` makes it.

    Attributes:
        kind: a word for messages.
        contents: what has to be equal on all ranks.
        failed: of a round that is here only to say that this rank has failed, the reason.
        until_all: of such a round: it says so until all ranks do.
        items: what is still to be done.
        error: why nothing more of the round is done.
        failed_call: why a call of the round has failed; see ``hook_calls``.
    """

    def __init__(
        self, line: Line, kind: str, contents: str, failed: str | None = None, until_all: bool = False
    ) -> None:
        self.kind, self.contents, self.failed, self.until_all = kind, contents, failed, until_all
        self.items: deque[Item] = deque()
        self.error: BaseException | None = None
        self.failed_call: BaseException | None = None
        self._line = line
        self._is_ended = failed is not None

    def launch(self, what: str, collective: Callable[[], Transfer], after: Sequence[Launched] = ()) -> Launched:
        """``collective`` is called by the issuing thread, when it is its turn: in the order of these calls.

        ``collective`` has to issue the same on every rank. Tensors of accelerators have to be staged before this call,
        by the thread whose stream has computed them (``staging``). If it raises, its error is raised by this wait, and
        the group is broken: what the other ranks have sent has no partner.

        Args:
            what: in words, for messages.
            collective: what to call.
            after: the collective sends on what these have received, so it is issued when that has arrived.

        Raises:
            RuntimeError: after `end`.
        """
        return self.launch_together([what], [collective], after)[0]

    def launch_together(
        self, what: Sequence[str], collectives: Sequence[Callable[[], Transfer]], after: Sequence[Launched] = ()
    ) -> list[Launched]:
        """As `launch`, for collectives of several devices that nothing comes between on any of them."""
        launched = [self._launched(each) for each in what]
        if launched:
            self._add(Item("collective", launched, collectives, after))
        return launched

    def call(self, what: str, call: Callable[[Watch, Line], Any]) -> Launched:
        """As `launch`, but ``call`` may send anything itself, and nothing after it is issued before it returns.

        It gets the check that has to end each of its waits, and the line. It keeps the issuing thread, so nothing
        of another group is issued either.
        """
        launched = self._launched(what)
        self._add(Item("call", [launched], [call]))
        return launched

    def say(self, what: str, value: Callable[[], Any], after: Sequence[Launched] = ()) -> Launched:
        """The result: what each rank says, in their order. ``value`` is called by the launcher's thread, after `after`.

        What it returns can be pickled, and is small.
        """
        launched = self._launched(what)
        self._add(Item("say", [launched], [value], after))
        return launched

    def end(self, used: Sequence[bool], error: BaseException | None = None) -> Launched:
        """The last of the round. Its result says for each entry of ``used`` if it is true on any rank.

        Args:
            used: as many entries on every rank; their number follows from ``contents``.
            error: why this rank has failed. Every rank's wait raises `PeerFailed` then. All that the other ranks launch
                in the round has to be launched here too, with zeros for example.
        """
        failed = None if error is None else f"in {self.kind!r}: {in_words(error)}"
        launched = self._launched("the end")
        self._add(Item("end", [launched], used=list(used), failed=failed))
        return launched

    def close(self) -> None:
        """The last of the round, without an exchange: no rank can fail in it."""
        self._add(Item("close", []))

    def _launched(self, what: str) -> Launched:
        return Launched(f"{what} of {self.kind!r}", self._line.health)

    def _add(self, item: Item) -> None:
        check_process(self._line.health)
        with self._line.changed:
            if self._is_ended:
                raise RuntimeError(f"the round {self.kind!r} has ended: nothing can be added to it")
            self._is_ended = item.kind in ("end", "close")
            error = self.error or self._line.health.broken
            if error is None:
                self.items.append(item)
                self._line.wake()
                return
        for launched in item.launched:
            launched.fail(error)


def check_process(health: Health) -> None:
    """Raises in a forked child. It is called before a lock is taken, which a thread of the parent may hold for ever."""
    if health.process != os.getpid():
        raise MachinesError(
            "this process was forked from one that is a rank of the process group, and is no rank itself: let the "
            "children of a rank, a DataLoader's workers for example, call no module that spans machines"
        )
