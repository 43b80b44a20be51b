"""`GroupState`: what the ranks of a process group know of each other's failures. `Result`: what waits for an item.

Nothing is sent over the user's group. Beside it the library connects the ranks by gloo, each lane by itself, and by one
communicator of NCCL for each device, made at the start. `Issuer` is the thread that issues what all lanes have.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from dataparallel.autograd.pass_of_backward import PassOfBackward
from dataparallel.forks import in_forked_child
from dataparallel.machines.collectives import SLICE, Check, Transfer
from dataparallel.machines.errors import (
    MachinesDiffer,
    MachinesError,
    PeerFailed,
    PeerGone,
    copy_error,
    describe_error,
    of_ranks,
)
from dataparallel.threads.pool import Outcome
from dataparallel.weak_members import WeakMembers

AT_EXIT = 1.0
"""Seconds that the end of the interpreter waits for a thread."""

MARGIN = 3.0
"""Seconds that a wait lasts longer than the group's timeout, so that gloo's own error can come first."""

ANSWER = 1.5
"""Seconds that a rank waits for what others say when the group is lost."""

RESTART = "Start all processes again, from a checkpoint"


class Issuer:
    """The thread that issues what each `Lane` has. It runs each until it has to wait, and sleeps when all wait.

    ``changed`` guards the items of all lanes, and `wake` notifies it. The thread is a daemon, as a launch may block.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begins without lanes and without a thread, as a forked child does."""
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
        polls = [lane.advance() for lane in lanes]
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
    issuer.begin()
    states.clear()


class Result:
    """The future of one item of a lane. Messages call the item ``what``; ``number`` is its place in the epoch."""

    def __init__(self, state: GroupState, lane: str, places: Sequence[int], what: str, epoch: int, number: int) -> None:
        self.state, self.lane, self.places = state, lane, places
        self.what, self.epoch, self.number = what, epoch, number
        self._decided = threading.Event()
        self._error: BaseException | None = None
        self._result: Any = None

    def wait(self) -> Any:
        """The tensor of a collective, ready for the calling thread's current stream, or the words of all ranks.

        Raises a `MachinesError`, or what a collective or a communication hook has raised on this rank.
        """
        self.state.check_process()
        check = self.state.wait_check(self)
        while not self._decided.wait(SLICE):
            check()
        result = self.issued()
        try:
            return result.wait(check) if isinstance(result, Transfer) else result
        except MachinesError:
            raise
        except RuntimeError as error:
            raise copy_error(self.state.error_of(self, error)) from error

    def settle(self, seconds: float) -> None:
        """Waits until the item has been issued, or has failed, for this long at most."""
        self._decided.wait(max(0.0, seconds))

    def has_arrived(self) -> bool:
        """True if what is received can be sent on."""
        return self._decided.is_set() and (not isinstance(self._result, Transfer) or self._result.has_arrived())

    def issued(self) -> Any:
        """The `Transfer` that has been issued, for the issuing thread to send on what it has received."""
        if self._error is not None:
            raise copy_error(self._error)
        return self._result

    def succeed(self, result: Any) -> None:
        self._result = result
        self._decided.set()

    def fail(self, error: BaseException) -> None:
        if not self._decided.is_set():
            self._error = error
            self._decided.set()


class GroupState:
    """The state that all lanes of the same ranks share. Any thread may use it.

    Ranks count *epochs*. A rank leaves an epoch if it fails in a step, or learns that it waits for what another rank
    will not send. It says in the store how many items of each lane it has issued, and waiting ranks read that. What was
    issued still arrives, so a step ends on all ranks or on none. The next epoch has new connections.

    A rank that is gone is known from gloo's errors, or from the timeout. Then the group is lost for good.

    Attributes:
        ranks: the global numbers of the ranks, which messages name.
        backends: for each type of device the backend that the user's group has.
        lost: why the group cannot be used any more.
        turns: numbers of lanes that rank 0 has sent; see `Lane`.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, backends: dict[str, str], timeout: float, store: Any
    ) -> None:
        self.ranks, self.rank, self.size = [*ranks], rank, len(ranks)
        self.backends, self.timeout = backends, timeout
        self.has_nccl = "nccl" in self.backends.values()
        self.store = distributed.distributed_c10d.PrefixStore(f"dataparallel/{name}", store)
        self.epoch = self.lane_count = 0
        self.lost: MachinesError | None = None
        self.lanes: WeakMembers[Any] = WeakMembers()
        self.passes: WeakMembers[PassOfBackward] = WeakMembers()  # that have begun over these ranks
        self._left: dict[int, MachinesError] = {}  # for each epoch that was left here the error
        self._old: list[Any] = []  # connections of former epochs
        self._losing = threading.Lock()
        self._process = os.getpid()  # a forked child is no rank
        self._begin_epoch()
        states.add(self)

    def _begin_epoch(self) -> None:
        self.connections: dict[str, Outcome] = {}
        self.nccl: dict[tuple[int, ...], Any] = {}  # communicators, by places of ranks
        self.turns: list[tuple[torch.Tensor, Any]] = []

    def names(self, places: Iterable[int]) -> str:
        """Ranks in words. ``places``: in the group."""
        return of_ranks(self.ranks[place] for place in places)

    def check_process(self) -> None:
        """Raises in a forked child. Call it before taking a lock: a thread of the parent may hold the lock for ever."""
        if self._process != os.getpid():
            raise MachinesError(
                "this process was forked from one that is a rank of the process group, and is no rank itself: let the "
                "children of a rank, a DataLoader's workers for example, call no module that spans machines"
            )

    # ---- connections

    def connect(self, name: str, places: Sequence[int]) -> Any:
        """Connects ranks by gloo, which waits for all of them. ``name`` is the same on these ranks, and new."""
        try:
            return distributed.ProcessGroupGloo(*self._place_in(name, places))
        except RuntimeError as error:
            host, address, text = socket.gethostname(), "", str(error)
            with suppress(OSError):
                address = socket.gethostbyname(host)
            if not os.environ.get("GLOO_SOCKET_IFNAME") and (not address or address.startswith("127.")):
                text += (
                    f". gloo offers the others the address of this host's name, and {host!r} is {address or 'unknown'},"
                    " which no other host can reach: if the machines are several hosts, set the environment variable "
                    "GLOO_SOCKET_IFNAME to the network interface that connects them, on each"
                )
            raise distributed.DistNetworkError(text) from error

    def communicators(self, places: tuple[int, ...]) -> Any:
        """NCCL's communicators of these ranks in this epoch, one for each device."""
        if places not in self.nccl:
            make: Any = distributed.ProcessGroupNCCL
            self.nccl[places] = make(*self._place_in(f"{self.epoch}/nccl/{places}", places))
        return self.nccl[places]

    def _place_in(self, name: str, places: Sequence[int]) -> tuple[Any, int, int, timedelta]:
        store = distributed.distributed_c10d.PrefixStore(name, self.store)
        return store, places.index(self.rank), len(places), timedelta(seconds=self.timeout)

    def is_nccl(self, device: torch.device) -> bool:
        """True if tensors on the device go through NCCL, whose collectives run on streams."""
        return self.backends.get(device.type) == "nccl"

    def forget_old(self) -> None:
        """Frees the connections of former epochs. Called when all ranks have issued something in the present one."""
        if self._old:
            self._old, old = [], self._old
            _free(old)

    def close(self) -> None:
        """Makes waits raise, when the interpreter ends."""
        self.lost = self.lost or MachinesError("the interpreter ends: nothing can be sent any more")
        with issuer.changed:
            self._drop_all(self.lost)

    def free(self) -> None:
        """Frees all connections, which ends their threads, if nothing is under way."""
        _free(self._old).join(AT_EXIT)

    def _drop_all(self, error: MachinesError) -> dict[str, int]:
        """Drops what all lanes have. Returns how many items each had issued. Called with ``issuer.changed`` held.

        No connection is freed here: that waits for threads of gloo, which may want the lock.
        """
        self._old += [*self.connections.values(), *self.nccl.values()]
        self._begin_epoch()
        return {lane.name: lane.drop(error) for lane in self.lanes}

    # ---- failures

    def why_not(self, epoch: int) -> MachinesError | None:
        """Why nothing can be issued for a step that has begun in this epoch."""
        return self.lost or (None if epoch == self.epoch else self._left[epoch])

    def leave(self, epoch: int, error: BaseException, what: str = "", is_heard: bool = False) -> None:
        """Leaves an epoch because a step that has begun in it has failed here, in ``what``, and tells the others.

        ``is_heard``: the error is what another rank has said. Does nothing if the epoch is over: all know of it.
        """
        self.check_process()
        text = f"{self.names([self.rank])} failed{f' in {what}' if what else ''}: {describe_error(error)}"
        known = copy_error(error) if isinstance(error, MachinesError) else _failed([text])
        said = None if is_heard else [str(error), True] if isinstance(error, MachinesDiffer) else [text, False]
        with issuer.changed:
            if self.lost is not None or epoch != self.epoch:
                return
            self._left[epoch], self.epoch = known, epoch + 1
            stopped = [*self.nccl.values()]
            counts = self._drop_all(known)  # others may still wait for what goes through its connections
        with suppress(RuntimeError):  # the store is gone, and so is its rank
            self.store.set(f"left/{epoch}/{self.rank}", json.dumps([counts, said]))
            self.store.set(f"left/{epoch}", "")
        for each in stopped:  # or streams would wait for ever
            threading.Thread(target=each.abort, daemon=True).start()

    def wait_check(self, result: Result) -> Check:
        """Returns a function for a wait to call: it raises if the result will not come. It reads the store seldom."""
        began = last = time.monotonic()

        def check() -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < SLICE and self.lost is None:
                return
            last = now
            error = self._error_for(result)
            if error is None and now - began > self.timeout + MARGIN:
                late = TimeoutError(f"nothing has come within the group's timeout of {self.timeout:g} s")
                error = self.lose(late, result)
            if error is not None:
                raise copy_error(error)

        return check

    def error_of(self, result: Result, error: BaseException) -> MachinesError:
        """The error for a result whose connection has failed: another rank has left the epoch and ended, or is gone."""
        return self._error_for(result, is_broken=True) or self.lose(error, result)

    def _error_for(self, result: Result, is_broken: bool = False) -> MachinesError | None:
        if self.lost is not None:
            return self.lost
        epoch, left = result.epoch, {}
        try:
            if self.store.check(["lost"]):
                return self.lose(None, result)
            if self.store.check([f"left/{epoch}"]):
                left = {place: json.loads(text) for place, text in self._said(f"left/{epoch}").items()}
        except RuntimeError:  # the store is gone, and so is its rank: gloo notices, or the timeout
            return self._left.get(epoch)
        counts = [left[place][0].get(result.lane, 0) for place in result.places if place in left]
        if not counts or (min(counts) > result.number and not is_broken):
            return None
        said = [each for _, each in left.values() if each]
        different = [text for text, is_difference in said if is_difference]
        error = MachinesDiffer(different[0]) if different else _failed(text for text, _ in said)
        self.leave(epoch, error, is_heard=True)
        return self.lost or self._left[epoch]

    def lose(self, error: BaseException | None, result: Result) -> MachinesError:
        """The group is lost: a rank is gone, or late. Returns the error of the first failure."""
        with self._losing:
            if self.lost is None:
                why, waits = self._tell_lost("" if error is None else describe_error(error), result.what)
                text = f"{self.names([self.rank])} has waited for {result.what}, and nothing comes any more: {why}. "
                if waits:
                    others = ", ".join(f"{self.names([place])} for {what}" for place, what in waits.items())
                    text += f"Others wait too: {others}. "
                if silent := {*range(self.size)} - {self.rank, *waits}:
                    text += f"No word from {self.names(silent)}. "
                text += "A process has ended or hangs, or the ranks do not run the same number of steps"
                lost = PeerGone(f"{text}. {RESTART}")
                lost.__cause__ = error
                self.lost = lost
        with issuer.changed:
            self._drop_all(self.lost)
        self.forget_old()
        return self.lost

    def _tell_lost(self, why: str, what: str) -> tuple[str, dict[int, str]]:
        """Says that the group is lost. Returns why, and what each of the others waits for, if it says so in time."""
        waits: dict[int, str] = {}
        until = time.monotonic() + ANSWER
        with suppress(RuntimeError):
            self.store.set(f"lost/{self.rank}", what)
            if self.store.check(["lost"]):
                why = self.store.get("lost").decode()  # of the first rank that has noticed it
            else:
                self.store.set("lost", why)
            while len(waits) < self.size and time.monotonic() < until:
                time.sleep(0.05)
                waits = self._said("lost")
        waits.pop(self.rank, None)
        return why, waits

    def _said(self, name: str) -> dict[int, str]:
        """What ranks have put in the store under this name."""
        keys = {place: f"{name}/{place}" for place in range(self.size)}
        return {place: self.store.get(key).decode() for place, key in keys.items() if self.store.check([key])}


def _failed(texts: Iterable[str]) -> PeerFailed:
    return PeerFailed(
        f"{'; '.join(texts)}. What was exchanged is dropped on every rank, and the group can still be used"
    )


def _free(connections: list[Any]) -> threading.Thread:
    """Drops connections in a thread: that waits for what is under way, until all ranks have dropped theirs."""
    thread = threading.Thread(target=connections.clear, daemon=True)
    thread.start()
    return thread
