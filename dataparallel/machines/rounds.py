"""`Round` and `Launched`: what the launcher's callers hold.

A round is what all ranks do together, for example one backward: it begins with a text that has to be equal on all
ranks, has collectives in one order, and an end. Its methods may be called by any thread and return at once. Waits are
on `Launched`, and every failure ends them. ``launcher`` makes rounds and plays them; ``units`` and ``composable`` fill
them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.futures import Future

from dataparallel.machines.agreement import in_words
from dataparallel.machines.board import LATE, Board
from dataparallel.machines.collectives import Transfer
from dataparallel.machines.errors import MachinesError, again
from dataparallel.machines.waiting import wait_for_event

__all__ = ["Home", "Item", "Launched", "Round", "Watch", "check_process"]


class Home(Protocol):
    """What a round needs of its launcher."""

    changed: threading.Condition
    broken: MachinesError | None
    process: int

    def break_because(self, error: BaseException, what: str) -> MachinesError:
        """The error that every wait raises from now on, because of this one."""

    def look(self, what: str, seconds: float) -> None:
        """Called several times a second by a wait that has lasted so long; raises if it is over."""

    def stop_looking(self) -> None:
        """The wait has ended."""


class Watch:
    """The check of one wait: it tells the board that the wait lasts, and raises when the launcher is broken."""

    def __init__(self, home: Home, what: str) -> None:
        self._home, self._what, self._began = home, what, time.monotonic()
        self._is_told = False

    def __call__(self) -> None:
        """Raises if the wait is over."""
        seconds = time.monotonic() - self._began
        self._is_told = self._is_told or seconds > LATE
        self._home.look(self._what, seconds)

    def end(self) -> None:
        """Has to be called when the wait has ended."""
        if self._is_told:
            self._home.stop_looking()


class Launched:
    """Something of a round. `wait` returns its result.

    Attributes:
        what: in words, for messages.
    """

    def __init__(self, what: str, home: Home) -> None:
        self.what = what
        self._home = home
        self._decided = threading.Event()
        self._error: BaseException | None = None
        self._result: Any = None

    def wait(self) -> Any:
        """The result: of a collective its tensor, of a hook what its future holds, of an end a list of bool.

        A tensor is ready for the calling thread's current stream.

        Raises:
            PeerGone: a rank is gone, or did not come within the group's timeout.
            PeerFailed: a rank has failed in this round.
            MachinesDiffer: the ranks have begun different rounds.
            Exception: what a collective or a hook has raised on this rank.
        """
        check_process(self._home)
        watch = Watch(self._home, self.what)
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
                    raise again(self._home.break_because(error, self.what)) from error
            elif isinstance(result, Future):
                result = result.wait()  # it is done: this orders the current stream
            return result
        finally:
            watch.end()

    def succeed(self, result: Any) -> None:
        """The launcher has issued it, or has its result."""
        self._result = result
        self._decided.set()

    def fail(self, error: BaseException) -> None:
        """The launcher will not issue it, or it has failed."""
        self._error = error
        self._decided.set()


class Item:
    """What a round has to issue.

    Attributes:
        launched: what its caller holds.
        kind: "collective" returns a `Transfer`, "hook" a future, "call" anything. An "end" has ``used`` and ``failed``
            instead, and a "close" nothing.
        call: of a collective, a hook or a call.
    """

    __slots__ = ("call", "failed", "kind", "launched", "used")

    def __init__(
        self,
        launched: Launched,
        kind: Literal["collective", "hook", "call", "end", "close"],
        call: Callable[..., Any] | None = None,
        used: Sequence[bool] = (),
        failed: str | None = None,
    ) -> None:
        self.launched, self.kind, self.call, self.used, self.failed = launched, kind, call, used, failed


class Round:
    """What all ranks do together. `Launcher.begin` makes it.

    Attributes:
        kind: a word for messages.
        contents: what has to be equal on all ranks.
        failed: of a round that is here only to say that this rank has failed, the reason.
        until_all: of such a round: it says so until all ranks do.
        items: what is still to be issued.
        error: why nothing more of the round is issued.
        failed_call: why a call of the round has failed; see ``hook_calls``.
        launcher: kept as long as the round is.
    """

    def __init__(
        self, home: Home, kind: str, contents: str, failed: str | None = None, until_all: bool = False
    ) -> None:
        self.kind, self.contents, self.failed, self.until_all = kind, contents, failed, until_all
        self.items: deque[Item] = deque()
        self.error: BaseException | None = None
        self.failed_call: BaseException | None = None
        self.launcher: object = None
        self._home = home
        self._is_ended = failed is not None

    def launch(self, what: str, collective: Callable[[], Transfer]) -> Launched:
        """The launcher's thread calls ``collective`` when it is its turn: in the order of these calls.

        ``collective`` has to issue the same on every rank. Tensors of accelerators have to be staged before this call,
        by the thread whose stream has computed them (``staging``). If it raises, its error is raised by this wait, and
        the group is broken: what the other ranks have sent has no partner.

        Raises:
            RuntimeError: after `end`.
        """
        launched = Launched(f"{what} of {self.kind!r}", self._home)
        self._add(Item(launched, "collective", collective))
        return launched

    def hook(self, what: str, call: Callable[[], Future[Tensor]]) -> Launched:
        """As `launch`, but nothing after it is issued before the future is done, which may issue collectives itself."""
        launched = Launched(f"{what} of {self.kind!r}", self._home)
        self._add(Item(launched, "hook", call))
        return launched

    def call(self, what: str, call: Callable[[Watch, Board], Any]) -> Launched:
        """As `launch`, but ``call`` may send anything itself, and nothing after it is issued before it returns.

        It gets the check that has to end each of its waits, and the group's board.
        """
        launched = Launched(f"{what} of {self.kind!r}", self._home)
        self._add(Item(launched, "call", call))
        return launched

    def end(self, used: Sequence[bool], error: BaseException | None = None) -> Launched:
        """The last of the round. Its result says for each entry of ``used`` if it is true on any rank.

        Args:
            used: as many entries on every rank; their number follows from ``contents``.
            error: why this rank has failed. Every rank's wait raises `PeerFailed` then. All that the other ranks launch
                in the round has to be launched here too, with zeros for example.
        """
        failed = None if error is None else f"in {self.kind!r}: {in_words(error)}"
        launched = Launched(f"the end of {self.kind!r}", self._home)
        self._add(Item(launched, "end", used=list(used), failed=failed))
        return launched

    def close(self) -> None:
        """The last of the round, without an exchange: no rank can fail in it."""
        self._add(Item(Launched(f"the end of {self.kind!r}", self._home), "close"))

    def _add(self, item: Item) -> None:
        check_process(self._home)
        with self._home.changed:
            if self._is_ended:
                raise RuntimeError(f"the round {self.kind!r} has ended: nothing can be added to it")
            self._is_ended = item.kind in ("end", "close")
            error = self.error or self._home.broken
            if error is None:
                self.items.append(item)
                self._home.changed.notify_all()
                return
        item.launched.fail(error)


def check_process(home: Home) -> None:
    """Raises in a forked child. It is called before a lock is taken, which a thread of the parent may hold for ever."""
    if home.process != os.getpid():
        raise MachinesError(
            "this process was forked from one that is a rank of the process group, and is no rank itself: let the "
            "children of a rank, a DataLoader's workers for example, call no module that spans machines"
        )
