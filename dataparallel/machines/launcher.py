"""`Launcher`: one thread of this process has the collectives of all groups issued, in an order that all ranks have.

Gradients come in any order and from any thread. A backend pairs collectives by the order in which each rank issues
them, and NCCL needs one order over all groups: the items of a queue of rounds come in one order, and `Order` says which
of two queues comes first.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from dataparallel.forks import in_forked_child
from dataparallel.machines.health import AT_EXIT, SLICE, Health

if TYPE_CHECKING:
    from dataparallel.machines.round_queue import RoundQueue

IDLE = 2.0
"""Seconds after which a thread ends if there is nothing to do."""


class Order:
    """In which order this process issues what its queues send, so that no two ranks differ.

    A process is in several sets of ranks: a row and a column of a mesh, for example. NCCL hangs if ranks that share two
    of them issue their collectives in different orders, or if more than two do so in a circle. So the ranks of a queue
    agree on a number for each of its items, and every process issues by these numbers. That is Skeen's total order of
    multicasts, in Birman and Joseph, "Reliable communication in the presence of failures" (1987):

    - When all ranks of a queue have said that they have the item, each proposes a number larger than all that it knows.
    - The largest proposal is the item's number, on all ranks of the queue.
    - A rank issues the item with the smallest number, if no other one that has been proposed can get a smaller one.

    Nobody proposes before all ranks have the item. So a proposal waits only for other launchers, which never block, and
    not for what a rank still computes or issues. The numbers grow along every row of waits, so there is no circle.

    Only the launcher's thread uses it. A queue has a name, equal on all of its ranks, and one item at a time here.
    """

    def __init__(self) -> None:
        self._largest = 0
        self._numbers: dict[str, int] = {}

    def propose(self, name: str) -> int:
        """This process's number for the next item of a queue."""
        self._largest += 1
        self._numbers[name] = self._largest
        return self._largest

    def settle(self, name: str, number: int) -> None:
        """The ranks of the queue have agreed on the number."""
        self._numbers[name] = number
        self._largest = max(self._largest, number)

    def is_first(self, name: str) -> bool:
        """True if the queue's item, whose number is settled, comes before all others. Names decide between equals."""
        return min((number, each) for each, number in self._numbers.items())[1] == name

    def leave(self, name: str) -> None:
        """The queue's item has been issued, or never will be."""
        self._numbers.pop(name, None)


class Issuing:
    """A thread that issues collectives one after the other, in the order that the launcher gives.

    A launch may block until all ranks have come to it: NCCL's first one on a device, and some of gloo. Meanwhile the
    other ranks need this one's proposals for other collectives, and the launcher makes them: if one thread did both,
    ranks would wait for each other in a circle. It is a daemon: at the end of the interpreter it may block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the thread, and that it sees every call
        self._queue: queue.Queue[tuple[Callable[[], object], Future[None]] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], object]) -> Future[None]:
        """``call`` is called when the calls before have returned. The result says when it has returned or raised.

        An error that is no ``Exception`` would end the thread that asks for the result: it becomes a ``RuntimeError``.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="machines: issuing", daemon=True)
                thread.start()  # if there can be no thread, nothing has changed
                self._thread = thread
            self._queue.put((call, future))
        return future

    def close(self, until: float) -> bool:
        """Makes no more calls, and waits for the one that is being made until this time, of the monotonic clock.

        Returns true if no call is being made any more.
        """
        with self._lock:
            while not self._queue.empty():
                self._queue.get_nowait()
            thread = self._thread
            if thread is not None:
                self._queue.put(None)
        if thread is not None:
            thread.join(max(0.0, until - time.monotonic()))
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            call, future = found
            try:
                call()
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                other = RuntimeError(f"{type(error).__name__}: {error}")
                other.__cause__ = error
                future.set_exception(other)
                del other
            else:
                future.set_result(None)
            del call, future, found  # nothing is held while there is nothing to do

    def _next(self) -> tuple[Callable[[], object], Future[None]] | None:
        """The next call. ``None`` if there is none: the thread ends, and the next `put` starts another one."""
        try:
            found = self._queue.get(timeout=IDLE)
        except queue.Empty:
            found = None
        if found is None:
            with self._lock:
                while found is None and not self._queue.empty():  # put meanwhile
                    found = self._queue.get_nowait()
                if found is None:
                    self._thread = None
        return found


class Launcher:
    """The thread lets each queue go on until that waits for something, and sleeps when all of them wait.

    It never blocks: the issuing thread makes the calls that may. It holds a queue only while that has rounds, and ends
    when there have been none for a while.

    Attributes:
        changed: guards the rounds of all queues. It is told when something has come that a queue may wait for.
        is_closed: the interpreter ends.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.order = Order()
        self.issuing = Issuing()
        self.is_closed = False
        self._healths: weakref.WeakSet[Health] = weakref.WeakSet()
        self._playing: dict[RoundQueue, None] = {}
        self._is_awake = self._is_parked = False
        self._thread: threading.Thread | None = None

    def include(self, health: Health) -> None:
        """It is closed when the interpreter ends."""
        self._healths.add(health)

    def play(self, rounds: RoundQueue) -> None:
        """The queue has a round."""
        with self.changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="machines: launcher", daemon=True)
                thread.start()  # if there can be no thread, nothing has changed
                self._thread = thread
            self._playing[rounds] = None
            self.wake()

    def wake(self, _: object = None) -> None:
        """Something has come that a queue may wait for."""
        with self.changed:
            self._is_awake = True
            self.changed.notify_all()

    def close(self) -> None:
        """Ends both threads, and then those of torch's groups. What is not issued yet is not sent.

        A thread of gloo frees what it has sent a while after the result is there, and takes the interpreter's lock for
        that. If the interpreter is ending, Python ends the thread there, and the process with it ("terminate called").
        """
        self.is_closed = True
        for health in [*self._healths]:
            health.close()
        self.wake()
        thread, until = self._thread, time.monotonic() + AT_EXIT
        while thread is not None and thread.is_alive() and not self._is_parked and time.monotonic() < until:
            thread.join(0.01)
        if self.issuing.close(until) and (thread is None or not thread.is_alive()):
            for health in [*self._healths]:
                health.free_groups()

    def _run(self) -> None:
        while not self.is_closed:
            is_waiting = self._advance_all()
            with self.changed:
                if not self._is_awake and not self.is_closed:
                    self.changed.wait(SLICE if is_waiting else IDLE)
                if not self._is_awake and not self._playing:
                    self._thread = None
                    return
        if self._playing:
            # Something is still under way. torch's groups wait for that when they are freed, for up to their timeout. A
            # daemon thread that stays here to the end keeps them.
            self._is_parked = True
            threading.Semaphore(0).acquire()

    def _advance_all(self) -> bool:
        """Returns true if the thread has to look again soon, whatever comes."""
        with self.changed:
            self._is_awake = False
            playing = [*self._playing]
        for each in playing:
            each.advance()
            with self.changed:
                if not each.has_rounds:
                    del self._playing[each]
        return any(each.is_waiting for each in playing)


_launcher = Launcher()


def launcher() -> Launcher:
    """The launcher of this process."""
    return _launcher


@in_forked_child
def _start_afresh_after_fork() -> None:
    global _launcher
    _launcher = Launcher()


@atexit.register
def _close_at_exit() -> None:
    _launcher.close()
