"""`Launcher`: one thread of this process decides when collectives of all groups are issued, in one order on all ranks.

Gradients come in any order and from any thread. But a backend pairs collectives by the order in which each rank issues
them, and NCCL needs one order over all groups. A queue of rounds orders its own items, and `Order` decides between
queues. `Issuing` is the thread that calls the backend.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from dataparallel.forks import in_forked_child
from dataparallel.machines.health import AT_EXIT, SLICE, Health
from dataparallel.weak_members import WeakMembers

if TYPE_CHECKING:
    from dataparallel.machines.rounds import RoundQueue

IDLE = 2.0
"""Seconds after which a thread ends if there is nothing to do."""


class Order:
    """The order in which this process issues the items of its queues. It is consistent on all ranks.

    A process is in several sets of ranks: a row and a column of a mesh, for example. NCCL hangs if ranks that share two
    sets issue their collectives in different orders, or if more than two ranks do so in a circle. So the ranks of a
    queue agree on a number for each item, and every process issues by these numbers. That is Skeen's total order of
    multicasts, in Birman and Joseph, "Reliable communication in the presence of failures" (1987):

    - When all ranks of a queue have confirmed an item, each rank proposes a number larger than all that it knows.
    - The largest proposal is the item's number, on all ranks of the queue.
    - A rank issues the item with the smallest number, unless another proposed item can still get a smaller number.

    No rank proposes before all ranks have the item. So a proposal waits only for other launchers, which never block,
    and not for work that a rank still computes or issues. Numbers grow along every chain of waits: there is no circle.

    Only the launcher's thread uses this object. A queue's name is equal on all ranks, and it has one item here.
    """

    def __init__(self) -> None:
        self._largest = 0
        self._numbers: dict[str, int] = {}

    def propose(self, name: str) -> int:
        """Returns this process's proposal for the next item of a queue."""
        self._largest += 1
        self._numbers[name] = self._largest
        return self._largest

    def settle(self, name: str, number: int) -> None:
        """Notes the number on which the ranks of the queue have agreed."""
        self._numbers[name] = number
        self._largest = max(self._largest, number)

    def is_first(self, name: str) -> bool:
        """True if the queue's item, whose number is settled, comes before all others. Names break ties."""
        return min((number, each) for each, number in self._numbers.items())[1] == name

    def leave(self, name: str) -> None:
        """Forgets the queue's item, which has been issued or never will be."""
        self._numbers.pop(name, None)


class Issuing:
    """The thread that issues collectives one after the other, in the launcher's order.

    A launch may block until all ranks have come to it: NCCL's first one on a device, and some of gloo. Meanwhile other
    ranks need this rank's proposals for other collectives, and the launcher makes them. If one thread did both, ranks
    would wait for each other in a circle. The thread is a daemon, because it may block when the interpreter ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the thread, and that it sees every call
        self._queue: queue.Queue[tuple[Callable[[], object], Future[None]] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], object]) -> Future[None]:
        """Has the thread call ``call`` after the calls before. The future is done when ``call`` has returned or raised.

        An error that is no ``Exception`` becomes a ``RuntimeError``: it would end the thread that reads the future.
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
        """Drops the calls that wait, and waits for the running call until this time of the monotonic clock.

        Returns true if no call is running any more.
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
            del call, future, found  # while the thread waits it holds no tensors

    def _next(self) -> tuple[Callable[[], object], Future[None]] | None:
        """The next call; ``None`` if there is none for a while. Then this thread ends, and `put` starts another one."""
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
    """The thread that runs the rounds of all queues. It runs each until it has to wait, and sleeps when all wait.

    The thread never blocks: the issuing thread makes the calls that may block. It holds a queue only while the queue
    has rounds, and ends when there have been no rounds for a while. ``changed`` guards the
    rounds of all queues, and `wake` notifies it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.order = Order()
        self.issuing = Issuing()
        self.is_closed = False
        self._healths: WeakMembers[Health] = WeakMembers()
        self._queues: dict[RoundQueue, None] = {}
        self._is_awake = self._is_parked = False
        self._thread: threading.Thread | None = None

    def include(self, health: Health) -> None:
        """Adds a group's health, which is closed when the interpreter ends."""
        self._healths.add(health)

    def run_queue(self, queue: RoundQueue) -> None:
        """Runs the queue, which has a new round, from now on."""
        with self.changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="machines: launcher", daemon=True)
                thread.start()  # if there can be no thread, nothing has changed
                self._thread = thread
            self._queues[queue] = None
            self.wake()

    def wake(self, _: object = None) -> None:
        """Wakes the thread, because something has come that a queue may wait for."""
        with self.changed:
            self._is_awake = True
            self.changed.notify_all()

    def close(self) -> None:
        """Ends both threads, and then the threads of torch's groups. Items that have not been issued are dropped.

        A thread of gloo frees what it has sent a while after the result has come, and takes the interpreter's lock for
        it. If the interpreter is ending, Python ends that thread, and with it the process ("terminate called").
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
                if not self._is_awake and not self._queues:
                    self._thread = None
                    return
        if self._queues:
            # A collective is still under way. Freeing torch's groups would wait for it, for up to their timeout. This
            # daemon thread keeps them alive to the end.
            self._is_parked = True
            threading.Semaphore(0).acquire()

    def _advance_all(self) -> bool:
        """Runs every queue until it waits. Returns true if the thread has to check their waits again soon."""
        with self.changed:
            self._is_awake = False
            queues = [*self._queues]
        for each_queue in queues:
            each_queue.advance()
            with self.changed:
                if not each_queue.has_rounds:
                    del self._queues[each_queue]
        return any(each_queue.is_waiting for each_queue in queues)


_launcher = Launcher()


def launcher() -> Launcher:
    return _launcher


@in_forked_child
def _start_afresh_after_fork() -> None:
    global _launcher
    _launcher = Launcher()


@atexit.register
def _close_at_exit() -> None:
    _launcher.close()
