"""`GroupState`: what the ranks of a group share, and the failure that ends it. `Result`: the future of an item.

Nothing is sent over the user's group. Beside it the library connects the ranks by gloo, each lane by itself, and by one
communicator of NCCL for each device, made at the start. `Issuer` is the thread that issues what all lanes have.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from dataparallel.forks import in_forked_child
from dataparallel.machines import errors
from dataparallel.machines.collectives import SLICE, Transfer
from dataparallel.machines.errors import MachinesError, PeerFailed, PeerGone, copy_error, describe_error, of_ranks
from dataparallel.weak_members import WeakMembers

AT_EXIT = 1.0
"""Seconds that the end of the interpreter waits for a thread."""

MARGIN = 3.0
"""Seconds that a wait lasts longer than the group's timeout, so that gloo's own error can come first."""

ANSWER = 1.5
"""Seconds that a rank waits for what others say when one is gone."""


class Issuer:
    """The thread that issues what each `Lane` has. It runs each until it has to wait, and sleeps when all wait.

    ``changed`` guards the items of all lanes, and `wake` notifies it. The thread is a daemon, as a launch may block.
    """

    def __init__(self) -> None:  # a forked child calls this again
        self.changed = threading.Condition()
        self.is_closed = self._is_awake = False
        self._lanes: dict[Any, None] = {}
        self._thread: threading.Thread | None = None

    def run(self, lane: Any) -> None:
        """Runs the lane, which has a new item, from now on."""
        with self.changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="machines: issuing", daemon=True)
                thread.start()  # if there can be no thread, nothing has changed
                self._thread = thread
            self._lanes[lane] = None
            self.wake()

    def wake(self, _: object = None) -> None:
        with self.changed:
            self._is_awake = True
            self.changed.notify_all()

    def close(self) -> None:
        """Ends the thread when the interpreter ends."""
        self.is_closed = True
        self.wake()
        if self._thread is not None:
            self._thread.join(AT_EXIT)

    def _run(self) -> None:
        while not self.is_closed:
            polls = self._advance()  # while the thread sleeps it holds no lane
            with self.changed:
                if not self._is_awake:
                    self.changed.wait(0.001 if polls else SLICE if self._lanes else None)

    def _advance(self) -> bool:
        with self.changed:
            self._is_awake = self.is_closed
            lanes = [*self._lanes]
        polls = [next(lane.steps) for lane in lanes]  # goes on to the next pause
        with self.changed:
            for lane in lanes:
                if not lane.items:
                    self._lanes.pop(lane, None)
        return any(polls)


issuer = Issuer()
states: WeakMembers[GroupState] = WeakMembers()
"""All of this process."""


@in_forked_child
def _start_afresh_after_fork() -> None:
    Issuer.__init__(issuer)
    states.clear()


class Result(Future[Any]):
    """The future of one item of a lane, which messages call ``what``. It is done when the item is issued."""

    def __init__(self, state: GroupState, what: str) -> None:
        super().__init__()
        self.state, self.what = state, what

    def wait(self) -> Any:
        """The tensor of a collective, ready for the calling thread's current stream, or the words of all ranks.

        Raises a `MachinesError`, or what a collective or a communication hook has raised on this rank.
        """
        self.state.check_process()
        check = self.state.wait_check(self.what)
        while not wait([self], SLICE).done:
            check()
        if (failed := self.exception()) is not None:
            raise copy_error(failed)
        result = self.result()
        try:
            return result.wait(check) if isinstance(result, Transfer) else result
        except RuntimeError as error:  # or what has ended the group already
            raise self.state.lose(error, self.what) from error


class GroupState:
    """The state that all lanes of the same ranks share. Any thread may use it.

    The first failure ends the group. A rank that fails says so in the store, and ranks that wait read that. A rank that
    is gone is known from gloo's errors, or from the timeout. Whoever waits then, or uses the group later, raises the
    first error.

    Attributes:
        ranks: the global numbers of the ranks, which messages name.
        backends: for each type of device the backend that the user's ``group`` has.
        lost: the error that has ended the group.
        turn: the number of a lane, which rank 0 sends, and the future of that.
    """

    def __init__(self, name: str, ranks: Sequence[int], backends: dict[str, str], timeout: float, group: Any) -> None:
        self.ranks, self.rank, self.size = [*ranks], ranks.index(distributed.get_rank()), len(ranks)
        self.backends, self.timeout, self.has_nccl = backends, timeout, "nccl" in backends.values()
        # A store serves one thread at a time, and one may wait in it for the other ranks: so there are clones.
        store = group.get_group_store().clone()
        self.store: Any = distributed.distributed_c10d.PrefixStore(f"dataparallel/{name}", store)
        self.lane_count = 0
        self.lost: MachinesError | None = None
        self.connections: dict[str, Future[Any]] = {}
        self.nccl: dict[tuple[int, ...], Any] = {}  # communicators, by places of ranks
        self.turn: tuple[torch.Tensor, Any] | None = None
        self._ending = threading.RLock()  # the garbage collector may end a failed pass of backward anywhere
        self._process = os.getpid()  # a forked child is no rank
        states.add(self)

    def check_process(self) -> None:
        """Raises in a forked child. Call it before taking a lock: a thread of the parent may hold the lock for ever."""
        if self._process != os.getpid():
            raise MachinesError(
                "this process was forked from one that is a rank of the process group, and is no rank itself: let the "
                "children of a rank, a DataLoader's workers for example, call no module that spans machines"
            )

    # ---- connections

    def connection(self, name: str, places: Sequence[int]) -> Future[Any]:
        """Connects ranks by gloo, once, in a thread of its own: that blocks until all of them have come."""
        if name not in self.connections:
            self.connections[name] = in_a_thread(lambda: self._connect(name, places))
            self.connections[name].add_done_callback(issuer.wake)
        return self.connections[name]

    def _connect(self, name: str, places: Sequence[int]) -> Any:
        try:
            return distributed.ProcessGroupGloo(*self._place_in(name, places))
        except RuntimeError as error:
            raise distributed.DistNetworkError(
                f"{error}. Between hosts, gloo offers the address of this host's name, {socket.gethostname()!r}. Where "
                "that is 127.0.0.1 or the like, set GLOO_SOCKET_IFNAME to the network interface that connects them"
            ) from error

    def communicators(self, places: tuple[int, ...]) -> Any:
        """NCCL's communicators of these ranks, one for each device."""
        if places not in self.nccl:
            make: Any = distributed.ProcessGroupNCCL
            self.nccl[places] = make(*self._place_in(f"nccl/{places}", places))
        return self.nccl[places]

    def _place_in(self, name: str, places: Sequence[int]) -> tuple[Any, int, int, timedelta]:
        store = distributed.distributed_c10d.PrefixStore(name, self.store.clone())
        return store, places.index(self.rank), len(places), timedelta(seconds=self.timeout)

    def free(self) -> None:
        """Frees all connections, which ends their threads, if nothing is under way."""
        wait([in_a_thread(each.clear) for each in (self.connections, self.nccl)], AT_EXIT)

    # ---- the first failure

    def refuse(self) -> None:
        """Raises the error that has ended the group, if any."""
        if self.lost is not None:
            raise copy_error(self.lost)

    def wait_check(self, what: str) -> Callable[[], None]:
        """Returns a function for a wait to call: it raises if the group has ended. It reads the store seldom."""
        began = last = time.monotonic()

        def check() -> None:
            nonlocal last
            now = time.monotonic()
            if self.lost is None and now - last >= SLICE:
                last = now
                with suppress(RuntimeError):  # the store is gone, and so is its rank: gloo notices, or the timeout
                    if self.store.check(["failed"]):
                        self.end(PeerFailed, "another rank has failed", what)
                if now - began > self.timeout + MARGIN:
                    self.lose(TimeoutError(f"nothing has come within the group's timeout of {self.timeout:g} s"), what)
            self.refuse()

        return check

    def fail(self, error: BaseException, what: str = "") -> None:
        """Ends the group because this rank has failed, in ``what``."""
        self.check_process()
        where = f" in {what}" if what else ""
        self.end(PeerFailed, f"{of_ranks([self.ranks[self.rank]])} failed{where}: {describe_error(error)}")

    def lose(self, error: BaseException, what: str) -> MachinesError:
        """Ends the group because a rank is gone, or late."""
        return self.end(PeerGone, describe_error(error), what)

    def end(self, kind: type[MachinesError], text: str, what: str = "nothing: it has failed") -> MachinesError:
        """Ends the group with this error or that of the first rank that did. ``what``: what this rank waits for."""
        with self._ending:
            if self.lost is None:
                said = [kind.__name__, text]
                with suppress(RuntimeError):  # the store is gone, and so is its rank
                    said = json.loads(self.store.compare_set("failed", "", json.dumps(said)))
                first, text = getattr(errors, said[0]), said[1]
                if first is PeerGone:
                    text = self._ask_who_waits(what, text)
                self.lost = self.lost or first(f"{text}. Start all processes again, from a checkpoint")
                for each in [*self.nccl.values()]:  # or streams would wait for ever
                    in_a_thread(each.abort)
        issuer.wake()
        return copy_error(self.lost)

    def _ask_who_waits(self, what: str, why: str) -> str:
        """Says what this rank waits for. Returns that, why nothing comes, and what others say in time."""
        waits, until = {self.rank: what}, time.monotonic() + ANSWER
        with suppress(RuntimeError):
            self.store.set(f"waits/{self.rank}", what)
            while len(waits) < self.size and time.monotonic() < until:
                time.sleep(0.05)
                said = [place for place in range(self.size) if self.store.check([f"waits/{place}"])]
                waits |= {place: self.store.get(f"waits/{place}").decode() for place in said}
        all_waits = [f"{of_ranks([self.ranks[place]])} has waited for {waits[place]}" for place in sorted(waits)]
        silent = [rank for place, rank in enumerate(self.ranks) if place not in waits]
        no_word = f"No word from {of_ranks(silent)}. " if silent else ""
        end = "A process has ended or hangs, or the ranks do not run the same number of steps"
        return f"{'; '.join(all_waits)}, and nothing comes any more: {why}. {no_word}{end}"


def in_a_thread(task: Callable[[], Any]) -> Future[Any]:
    """Begins a task that may block in a thread that nobody waits for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
