"""`Launcher`: the thread of one group that issues collectives one after the other, in the same order on every rank.

Gradients come in any order and from any thread; a backend pairs collectives by the order in which each rank issues
them. So one thread issues them, round by round (``rounds``): it agrees with the other ranks on what comes
(``agreement``), issues the round's collectives as they are launched, and exchanges the end.

What ends a wait:

- the collective, or torch's own error for it;
- a failure that any thread of this rank has seen: the launcher is *broken* then, and every wait raises the same
  sentence, now and later;
- a failure that another rank has told (``board``);
- the group's timeout and three seconds, whatever torch does.

A round that the ranks disagree on, and one in which a rank has failed, ends for itself alone: later rounds work.

The thread holds this group's data and the rounds, no module: what was issued is dropped. It is a daemon, ends when the
launcher is dropped, and is stopped before the interpreter ends.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from typing import Any

from torch import distributed
from torch.futures import Future

from dataparallel.machines.agreement import agree, exchange_used, in_words
from dataparallel.machines.backend import Group
from dataparallel.machines.board import LATE, Board
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed, PeerGone, again
from dataparallel.machines.rounds import Item, Round, Watch, check_process
from dataparallel.machines.waiting import wait_for_future

__all__ = ["Launcher"]

MARGIN = 3.0
"""Seconds that a wait lasts longer than the group's timeout, so that torch can say its own words first."""

RESTART = "Start all processes again, from a checkpoint"

TELLING = 2.0
"""Seconds that a failure here waits until the others can know of it."""

AT_EXIT = 1.0
"""Seconds that the end of the interpreter waits for the threads."""


_lines: weakref.WeakSet[_Line] = weakref.WeakSet()
"""Of all launchers of this process."""


class Launcher:
    """The launcher of one group. `Machines.launcher` makes it.

    Rounds that have not ended keep it: another launcher of the group would issue its collectives between theirs.
    """

    def __init__(self, group: Group) -> None:
        self._line = _Line(group)
        weakref.finalize(self, self._line.close).atexit = False
        _lines.add(self._line)

    @property
    def broken(self) -> MachinesError | None:
        """Why the group cannot be used any more, if so."""
        return self._line.broken

    def give_up(self, error: BaseException, what: str) -> MachinesError:
        """Breaks the group, because what its ranks do outside of rounds has failed. Returns the error to raise."""
        return again(self._line.break_because(error, what))

    def begin(self, kind: str, contents: str) -> Round:
        """Begins a round, which all ranks have to do in the same order. It starts when the rounds before have ended.

        If the ranks differ in kind or contents, nothing of the round is issued on any rank, and every wait of it raises
        `MachinesDiffer`. A broken group is no error here: the waits raise.

        Args:
            kind: a word for messages, ``"backward"`` for example.
            contents: lines of text that are equal on all ranks. Whatever decides the number, order, sizes and dtypes of
                the round's collectives has to be in it.
        """
        return self._add(Round(self._line, kind, contents))

    def signal_failure(self, error: BaseException) -> None:
        """Tells the other ranks that this one has failed before a round that they begin.

        Their next round then raises `PeerFailed`, with this error in words. This returns at once.
        """
        text = f"before a round: {in_words(error)}"
        self._line.tell_failure(text)
        self._add(Round(self._line, "a failure", "", failed=text))

    def fail_until_all_do(self, error: BaseException) -> None:
        """Tells the other ranks that this one has failed, in every round that they begin until they all call this too.

        That is for rounds of which ranks may have begun different numbers when one fails. Each rank calls it once for
        each failure, also where it has failed because another one has. This returns at once.
        """
        text = f"before a round: {in_words(error)}"
        self._line.tell_failure(text)
        self._add(Round(self._line, "a failure", "", failed=text, until_all=True))

    def _add(self, round: Round) -> Round:
        round.launcher = self
        return self._line.add(round)


class _Line:
    """The rounds that wait for their turn, and the thread that plays them."""

    def __init__(self, group: Group) -> None:
        self.process = os.getpid()
        self.changed = threading.Condition()
        self.broken: MachinesError | None = None
        self._group = group
        self._names = group.names
        self._name = group.names([group.rank])
        self._board = Board(group)
        self._rounds: deque[Round] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_exit = self._is_parked = False

    # ---- what rounds and waits call

    def add(self, round: Round) -> Round:
        check_process(self)
        with self.changed:
            if self.broken is not None:
                round.error = self.broken
                return round
            if self._is_closed:
                raise MachinesError("the interpreter ends: nothing can be sent any more")
            self._rounds.append(round)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="machines: launcher", daemon=True)
                self._thread.start()
            self.changed.notify_all()
        return round

    def look(self, what: str, seconds: float) -> None:
        if self.broken is not None:
            raise again(self.broken)
        if self._is_closed:
            raise MachinesError(f"the launcher was closed while something waited for {what}")
        if seconds > LATE:
            self._board.note_wait(what)
        if self._board.broken is not None:
            raise again(self._break(_told(self._board.broken, f"{self._name} has waited for {what}. ")))
        if seconds > self._group.timeout + MARGIN:
            late = TimeoutError(f"nothing has come within the group's timeout of {self._group.timeout:g} s")
            raise again(self.break_because(late, what))

    def stop_looking(self) -> None:
        self._board.forget_wait()

    def tell_failure(self, text: str) -> None:
        """Puts on the board that this rank has failed, for others that do not reach the next round."""
        self._board.tell_failure(text)

    def break_because(self, error: BaseException, what: str) -> MachinesError:
        """Breaks the launcher because a peer is gone. Returns the error of the first failure."""
        if self.broken is not None:
            return self.broken
        self._board.note_wait(what)
        said = self._board.words_of_others()
        if self._board.broken is not None:  # another rank knows more
            return self._break(_told(self._board.broken, f"{self._name} has waited for {what}. "))
        waits = [f"{self._names([rank])} for {word['waits']}" for rank, word in sorted(said.items()) if word["waits"]]
        failures = [f"{self._names([rank])} {word['failed']}" for rank, word in sorted(said.items()) if word["failed"]]
        others = [rank for rank in range(self._group.size) if rank != self._group.rank]
        silent = [rank for rank in others if rank not in said]
        text = f"{self._name} has waited for {what}, and nothing comes any more: {in_words(error)}. "
        if waits:
            text += f"Others wait too: {', '.join(waits)}. "
        if failures:
            text += f"Others have failed: {', '.join(failures)}. "
        if silent:
            text += f"No word from {self._names(silent)}. "
        text += "A process has ended or hangs, or the ranks do not run the same number of steps"
        reason = {"kind": "gone", "rank": self._name, "text": text}
        self._board.tell_broken(reason)
        gone = PeerGone(f"{text}. {RESTART}")
        gone.__cause__ = error
        return self._break(gone)

    def _break(self, error: MachinesError) -> MachinesError:
        with self.changed:
            if self.broken is None:
                self.broken = error
            rounds = [*self._rounds]
            self._rounds.clear()
            self.changed.notify_all()
        for round in rounds:
            self._drop(round, self.broken)
        return self.broken

    def close(self, is_exit: bool = False) -> None:
        """Ends the threads. What is not issued yet is not sent."""
        if self.process != os.getpid():
            return
        with self.changed:
            self._is_closed, self._is_exit = True, is_exit
            rounds = [*self._rounds]
            self._rounds.clear()
            self.changed.notify_all()
            thread = self._thread
        for round in rounds:
            self._drop(round, MachinesError(f"the launcher was closed before the end of {round.kind!r}"))
        until = time.monotonic() + AT_EXIT
        while thread is not None and thread is not threading.current_thread() and thread.is_alive():
            if self._is_parked or time.monotonic() > until:
                break
            thread.join(0.01)
        self._board.close(AT_EXIT)

    # ---- the thread

    def _run(self) -> None:
        while (round := self._next_round()) is not None:
            try:
                self._play(round)
            except (PeerFailed, MachinesDiffer) as error:
                self._finish(round, error)
            except BaseException as error:
                if self._is_closed:
                    break
                self._finish(round, self.broken or self.break_because(error, f"the beginning of {round.kind!r}"))
            del round  # the thread holds nothing while it waits for the next one
        else:
            return
        if self._is_exit:
            # Something is still under way. torch's group waits for that when it is freed, for up to its timeout. A
            # daemon thread that stays here to the end keeps the group.
            self._is_parked = True
            threading.Semaphore(0).acquire()

    def _next_round(self) -> Round | None:
        with self.changed:
            while not (self._rounds or self._is_closed or self.broken):
                self.changed.wait()
            return self._rounds[0] if self._rounds else None

    def _play(self, round: Round) -> None:
        """From the agreement to the end.

        Raises:
            PeerFailed, MachinesDiffer: the round alone is over.
            Exception: a peer is gone.
        """
        watch = Watch(self, f"the beginning of {round.kind!r}")
        try:
            self._agree(round, watch)
        finally:
            watch.end()
            if round.failed is not None and not (self.broken or self._is_closed):
                self._board.tell_failure("")  # the others know
        while True:
            item = self._next_item(round)
            launched = item.launched
            if item.kind == "end":
                self._end(round, item)
                return
            if item.kind == "close":
                self._finish(round, None)
                return
            try:
                launched.succeed(self._issue(item))
            except BaseException as error:
                if isinstance(error, MachinesError):
                    launched.fail(error)
                elif _is_of_network(error):
                    launched.fail(self.break_because(error, launched.what))
                else:
                    reason = self._tell_failed_here(error, launched.what)
                    launched.fail(error)
                    self._break(_told(reason))
                raise
            del item, launched

    def _agree(self, round: Round, watch: Watch) -> None:
        while True:
            try:
                agree(self._group, round.kind, round.contents, round.failed, watch)
                return
            except PeerFailed as error:
                if error.by_all or not round.until_all:
                    raise

    def _next_item(self, round: Round) -> Item:
        with self.changed:
            while not round.items:
                if self._is_closed:
                    raise MachinesError("closed")
                if self.broken is not None:
                    raise again(self.broken)
                self.changed.wait()
            return round.items.popleft()

    def _issue(self, item: Item) -> Any:
        assert item.call is not None
        if item.kind == "call":
            watch = Watch(self, item.launched.what)
            try:
                return item.call(watch, self._board)
            finally:
                watch.end()
        result = item.call()
        if item.kind == "hook":
            future: Future[Any] = result
            watch = Watch(self, item.launched.what)
            try:
                wait_for_future(future, watch)
            finally:
                watch.end()
            future.value()  # raises its error
        return result

    def _end(self, round: Round, item: Item) -> None:
        watch = Watch(self, item.launched.what)
        try:
            used = exchange_used(self._group, item.used, item.failed, watch)
        except BaseException as error:
            failed = isinstance(error, MachinesError)
            item.launched.fail(error if failed else self.break_because(error, item.launched.what))
            raise
        finally:
            watch.end()
        self._finish(round, None)
        item.launched.succeed(used)

    def _tell_failed_here(self, error: BaseException, what: str) -> dict[str, Any]:
        """A collective or a hook has raised on this rank: the others have sent what gets no partner any more.

        They are told before anybody here knows, who may end this process. Returns the reason that was told.
        """
        reason = {"kind": "failed", "rank": self._name, "text": f"{self._name} failed in {what}: {in_words(error)}"}
        self._board.tell_broken(reason)
        self._board.wait_until_told(TELLING)
        return reason

    def _finish(self, round: Round, error: BaseException | None) -> None:
        with self.changed:
            if self._rounds and self._rounds[0] is round:
                self._rounds.popleft()
        if error is not None:
            self._drop(round, error)

    def _drop(self, round: Round, error: BaseException) -> None:
        with self.changed:
            round.error = error
            items = [*round.items]
            round.items.clear()
        for item in items:
            item.launched.fail(error)


def _told(reason: dict[str, Any], before: str = "") -> MachinesError:
    """The error for a reason that a rank has put on the board."""
    if reason["kind"] == "failed":
        return PeerFailed(f"{before}{reason['text']}. What the others have sent gets no partner any more. {RESTART}")
    return PeerGone(f"{before}{reason['rank']} has told why nothing comes any more: {reason['text']}. {RESTART}")


def _is_of_network(error: BaseException) -> bool:
    """True if torch or gloo has raised it because a peer is gone or late."""
    said = str(error)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL each collective begins with a monitored barrier.
    return isinstance(error, distributed.DistError) or "/gloo/" in said or "monitoredBarrier" in said


@atexit.register
def _close_all() -> None:
    for line in [*_lines]:
        line.close(is_exit=True)
