"""Calls of a user's function that sends something itself: a communication hook.

The issuing thread calls it when it is its turn in a round, and issues nothing else before its future is done. What
such a function sends, and over which group, nobody here knows. So if it fails on one rank, two things may be true: the
others have what they wait for, or they wait for something that this rank will never send.

After each call the ranks say whether it has failed, over the line's connections, which no hook uses. If the call has
failed on some rank, nothing more of the pass is called, every rank raises, and the next round works. A rank on which it
has failed also puts that on the board. If another rank has read this and still waits for its own future `GRACE` seconds
later, its collective will never be answered, and later ones would be paired with it: the group is broken, and every
rank says so.

``composable.hooked_machine_sums`` makes the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dataparallel.machines.agreement import failures, in_words
from dataparallel.machines.control import waited
from dataparallel.machines.errors import MachinesError, again
from dataparallel.machines.waiting import Check, wait_for_future

if TYPE_CHECKING:
    from dataparallel.machines.board import Board
    from dataparallel.machines.line import Line
    from dataparallel.machines.rounds import Launched, Round

__all__ = ["GRACE", "HookCall", "HookCalls"]

GRACE = 2.0
"""Seconds that a hook has to end after it has failed on another rank."""


class HookCalls:
    """The calls of one hook, which all ranks make in the same order."""

    def __init__(self) -> None:
        self.number = 0

    def call(self, round: Round, what: str, begin: Callable[[], Any], check: Callable[[], None]) -> HookCall:
        """Adds a call to the round. The issuing thread calls ``begin``, and ``check`` when its future is done.

        Either may raise. After a failure on any rank, later calls of the round are not made.
        """
        call = HookCall(self, round, what, begin, check)
        call.launched = round.call(what, call.run)
        return call


class HookCall:
    """One call. ``launched`` is what the round has given for it."""

    launched: Launched

    def __init__(
        self, calls: HookCalls, round: Round, what: str, begin: Callable[[], Any], check: Callable[[], None]
    ) -> None:
        self._calls, self._round, self._what = calls, round, what
        self._functions: tuple[Callable[[], Any], Callable[[], None]] | None = (begin, check)
        self._own: BaseException | None = None

    def wait(self) -> None:
        """Blocks until the call is done on this rank, and known to have succeeded on all.

        Raises:
            Exception: what ``begin`` or ``check`` has raised here.
            PeerFailed: it has failed on another rank.
            PeerGone: as `Launched.wait`.
        """
        try:
            self.launched.wait()
        except MachinesError:
            if self._own is None:
                raise
        if self._own is not None:
            raise self._own
        if self._round.failed_call is not None:
            raise again(self._round.failed_call)

    def run(self, watch: Check, line: Line) -> None:
        """Called by the issuing thread."""
        functions, self._functions = self._functions, None  # they may refer to this object
        if self._round.failed_call is not None or functions is None:
            return
        begin, check = functions
        self._calls.number += 1
        board, key = line.health.board, f"hook {self._calls.number} of {line.name}"
        try:
            wait_for_future(begin(), _Patience(watch, board, key))
            check()
        except MachinesError:
            raise
        except _Unanswered as error:
            raise RuntimeError(str(error)) from None
        except Exception as error:
            self._own = error
            board.say(key, in_words(error))
        said = waited(line.control.all(None if self._own is None else f": {in_words(self._own)}"), watch)
        self._round.failed_call = self._own or failures(line.group, said)


class _Unanswered(Exception):
    """What a hook has sent here gets no answer."""


class _Patience:
    """The check of a wait for a hook's future: it gives up some time after the hook has failed on another rank."""

    def __init__(self, watch: Check, board: Board, key: str) -> None:
        self._watch, self._board, self._key = watch, board, key
        self._heard: float | None = None
        board.ask(key)

    def __call__(self) -> None:
        self._watch()
        heard = self._board.heard(self._key)
        if heard is None:
            return
        if self._heard is None:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > GRACE:
            raise _Unanswered(f"what it has sent here gets no answer, because it has failed on another rank: {heard}")
