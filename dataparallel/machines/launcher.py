"""`Launcher`: one thread of this process has the collectives of all groups issued, in an order that all ranks have.

Gradients come in any order and from any thread. A backend pairs collectives by the order in which each rank issues
them, and NCCL needs one order over all groups. So each purpose of each group has a ``line``, whose items come in one
order on all ranks, and ``order`` says in which order items of different lines are issued. The thread lets each line go
on until it waits for something, and sleeps when all of them wait. It never blocks: calls that may block are made by the
issuing thread (``issuing``).

The thread holds a line only while that has rounds, and ends when there have been none for a while. It is a daemon, and
is stopped before the interpreter ends.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import TYPE_CHECKING

from dataparallel.forks import in_forked_child
from dataparallel.machines.issuing import Issuing
from dataparallel.machines.order import Order
from dataparallel.machines.waiting import SLICE

if TYPE_CHECKING:
    from dataparallel.machines.health import Health
    from dataparallel.machines.line import Line

__all__ = ["Launcher", "launcher"]

AT_EXIT = 1.0
"""Seconds that the end of the interpreter waits for a thread."""

IDLE = 2.0
"""Seconds after which the thread ends if there is nothing to do."""


class Launcher:
    """The thread, and what is guarded for it.

    Attributes:
        changed: guards the rounds of all lines. It is told when something has come that a line may wait for.
        order: of items that are ready.
        issuing: the thread that issues them.
        is_closed: the interpreter ends.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.order = Order()
        self.issuing = Issuing()
        self.is_closed = False
        self._healths: weakref.WeakSet[Health] = weakref.WeakSet()
        self._playing: dict[Line, None] = {}
        self._is_awake = self._is_parked = False
        self._thread: threading.Thread | None = None

    def include(self, health: Health) -> None:
        """It is closed when the interpreter ends."""
        self._healths.add(health)

    def play(self, line: Line) -> None:
        """The line has a round."""
        with self.changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="machines: launcher", daemon=True)
                thread.start()  # if there can be no thread, nothing has changed
                self._thread = thread
            self._playing[line] = None
            self.wake()

    def wake(self, _: object = None) -> None:
        """Something has come that a line may wait for."""
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
                health.let_go()

    def _run(self) -> None:
        while not self.is_closed:
            waits = self._advance_all()
            with self.changed:
                if not self._is_awake and not self.is_closed:
                    self.changed.wait(SLICE if waits else IDLE)
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
        for line in playing:
            line.advance()
            with self.changed:
                if not line.has_rounds:
                    del self._playing[line]
        return any(line.waits for line in playing)


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
