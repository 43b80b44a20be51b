"""`Machines`: the ranks of a process group, or some of them. `GroupState`: what they know of each other's failures.

Nothing is sent over the user's group. Beside it the library connects the ranks by gloo, each lane by itself, and by one
communicator of NCCL for each device, made at the start.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from dataparallel import _torch
from dataparallel.devices import CPU
from dataparallel.forks import in_forked_child
from dataparallel.machines.collectives import SLICE, Check, all_gather, all_reduce, stage
from dataparallel.machines.descriptions import of_ranks
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed, PeerGone, copy_error, describe_error
from dataparallel.machines.lanes import AT_EXIT, Lane, Result, Turns, issuer
from dataparallel.weak_members import WeakMembers

MARGIN = 3.0
"""Seconds that a wait lasts longer than the group's timeout, so that gloo's own error can come first."""

ANSWER = 1.5
"""Seconds that a rank waits for what others say when the group is lost."""

RESTART = "Start all processes again, from a checkpoint"

_given: dict[int, tuple[Any, Machines]] = {}
"""Users' groups by their ids, with their `Machines`. They are held until they are destroyed, on all ranks alike."""
_products: dict[tuple[int, ...], int] = {}
"""How many products of the same ranks were made."""
_states: WeakMembers[GroupState] = WeakMembers()
_lock = threading.Lock()


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
    """

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, backends: dict[str, str], timeout: float, store: Any
    ) -> None:
        self.ranks, self.rank, self.size = [*ranks], rank, len(ranks)
        self.backends, self.timeout = backends, timeout
        self.has_nccl = "nccl" in self.backends.values()
        self.store = distributed.distributed_c10d.PrefixStore(f"dataparallel/{name}", store)
        self.epoch, self.turns = 0, Turns()
        self.lost: MachinesError | None = None
        self.lane_count = 0
        self.lanes: WeakMembers[Lane] = WeakMembers()
        self.nccl: dict[tuple[int, ...], Any] = {}  # the communicators of this epoch, by places of ranks
        self._left: dict[int, MachinesError] = {}  # for each epoch that was left here the error
        self._old: list[Any] = []  # connections of former epochs
        self._losing = threading.Lock()
        self._process = os.getpid()  # a forked child is no rank
        _states.add(self)

    def names(self, places: Iterable[int]) -> str:
        """Ranks in words. ``places``: in the group."""
        return of_ranks(self.ranks[place] for place in places)

    @property
    def is_of_this_process(self) -> bool:
        return self._process == os.getpid()

    def check_process(self) -> None:
        """Raises in a forked child. Call it before taking a lock: a thread of the parent may hold the lock for ever."""
        if not self.is_of_this_process:
            raise MachinesError(
                "this process was forked from one that is a rank of the process group, and is no rank itself: let the "
                "children of a rank, a DataLoader's workers for example, call no module that spans machines"
            )

    # ---- connections

    def connect(self, lane: Lane, key: tuple[int, ...] | str, epoch: int) -> Any:
        """Connects ranks by gloo; see `Lane.connect`. gloo waits for all of them."""
        every, own = tuple(range(self.size)), lane.machines.places
        places = every if key == "turns" else own if isinstance(key, str) else key
        name = key if key == "turns" else f"{lane.name}/{own}/{key}"
        store = distributed.distributed_c10d.PrefixStore(f"{epoch}/{name}", self.store)
        try:
            return distributed.ProcessGroupGloo(
                store, places.index(self.rank), len(places), timedelta(seconds=self.timeout)
            )
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

    def _drop_all(self, error: MachinesError) -> dict[str, int]:
        """Drops what all lanes have. Returns how many items each had issued. Called with ``issuer().changed`` held.

        No connection is freed here: that waits for threads of gloo, which may want the lock.
        """
        self._old += [each for lane in self.lanes for each in lane.connections.values()]
        self._old += [*self.turns.connections.values(), *self.nccl.values()]
        self.turns, self.nccl = Turns(), {}
        return {lane.name: lane.drop(error) for lane in self.lanes}

    def close(self) -> None:
        """Frees all connections when the interpreter ends, which ends their threads, if nothing is under way."""
        with issuer().changed:
            self._drop_all(MachinesError("the interpreter ends: nothing can be sent any more"))
        _free(self._old).join(AT_EXIT)

    # ---- failures

    def why_not(self, epoch: int) -> MachinesError | None:
        """Why nothing can be issued for a step that has begun in this epoch."""
        if issuer().is_closed:
            return MachinesError("the interpreter ends: nothing can be sent any more")
        return self.lost or (None if epoch == self.epoch else self._left[epoch])

    def leave(self, epoch: int, error: BaseException, what: str = "", is_heard: bool = False) -> None:
        """Leaves an epoch because a step that has begun in it has failed here, in ``what``, and tells the others.

        ``is_heard``: the error is what another rank has said. Does nothing if the epoch is over: all know of it.
        """
        self.check_process()
        text = f"{self.names([self.rank])} failed{f' in {what}' if what else ''}: {describe_error(error)}"
        known = copy_error(error) if isinstance(error, MachinesError) else _failed([text])
        said = None if is_heard else [str(error), True] if isinstance(error, MachinesDiffer) else [text, False]
        with issuer().changed:
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

    def forget_old(self) -> None:
        """Frees the connections of former epochs. Called when all ranks have issued something in the present one."""
        if self._old:
            self._old, old = [], self._old
            _free(old)

    def wait_check(self, result: Result) -> Check:
        """Returns a function for a wait to call: it raises if the result will not come. It reads the store seldom."""
        began = time.monotonic()
        last = [began]

        def check() -> None:
            now = time.monotonic()
            if now - last[0] < SLICE and self.lost is None:
                return
            last[0] = now
            if issuer().is_closed:
                raise MachinesError(f"the interpreter ends while something waits for {result.what}")
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
        epoch, lane = result.epoch, result.lane
        if self.lost is not None:
            return self.lost
        left: dict[int, Any] = {}
        try:
            if self.store.check(["lost"]):
                return self.lose(None, result)
            if self.store.check([f"left/{epoch}"]):
                keys = {place: f"left/{epoch}/{place}" for place in range(self.size)}
                left = {place: json.loads(self.store.get(k)) for place, k in keys.items() if self.store.check([k])}
        except RuntimeError:  # the store is gone, and so is its rank: gloo notices, or the timeout
            return self._left.get(epoch)
        counts = [left[place][0].get(lane.name, 0) for place in lane.machines.places if place in left]
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
                name = self.names([self.rank])
                why, waits, silent = self._waits_of_others("" if error is None else describe_error(error), result.what)
                text = f"{name} has waited for {result.what}, and nothing comes any more: {why}. "
                if waits:
                    others = ", ".join(f"{self.names([place])} for {what}" for place, what in waits.items())
                    text += f"Others wait too: {others}. "
                if silent:
                    text += f"No word from {self.names(silent)}. "
                text += "A process has ended or hangs, or the ranks do not run the same number of steps"
                lost = PeerGone(f"{text}. {RESTART}")
                lost.__cause__ = error
                self.lost = lost
        with issuer().changed:
            self._drop_all(self.lost)
        self.forget_old()
        return self.lost

    def _waits_of_others(self, why: str, what: str) -> tuple[str, dict[int, str], list[int]]:
        """Says why the group is lost, and what this rank waited for. Returns what others say, and who says nothing."""
        waits: dict[int, str] = {}
        others, until = [place for place in range(self.size) if place != self.rank], time.monotonic() + ANSWER
        with suppress(RuntimeError):
            self.store.set(f"lost/{self.rank}", what)
            if self.store.check(["lost"]):
                why = self.store.get("lost").decode()  # of the first rank that has noticed it
            else:
                self.store.set("lost", why)
            while len(waits) < len(others) and time.monotonic() < until:
                time.sleep(0.05)
                keys = {place: f"lost/{place}" for place in others if place not in waits}
                waits |= {place: self.store.get(k).decode() for place, k in keys.items() if self.store.check([k])}
        return why, waits, [place for place in others if place not in waits]


def _failed(texts: Iterable[str]) -> PeerFailed:
    return PeerFailed(
        f"{'; '.join(texts)}. What was exchanged is dropped on every rank, and the group can still be used"
    )


def _free(connections: list[Any]) -> threading.Thread:
    """Drops connections in a thread: that waits for what is under way, until all ranks have dropped theirs."""
    thread = threading.Thread(target=connections.clear, daemon=True)
    thread.start()
    return thread


class Machines:
    """Ranks that send together: all of a group, or some. They have ``places`` in the group, and ``ranks`` of all."""

    def __init__(self, state: GroupState, places: Sequence[int]) -> None:
        self.state, self.places = state, tuple(places)
        self.ranks = [state.ranks[place] for place in places]
        self.rank, self.size = self.places.index(state.rank), len(self.places)
        self.has_nccl = state.has_nccl
        self._names: dict[torch.device, str] = {}  # of the devices that have a communicator of NCCL
        self._made: dict[Any, Any] = {}
        self.words, self._tensors = self.lane("words"), self.lane("tensors")  # outside of steps

    @staticmethod
    def of(group: distributed.ProcessGroup) -> Machines:
        """The machines of the group: the same object each time, until the group is destroyed."""
        with _lock:
            for key, (known, _) in [*_given.items()]:
                if not _exists(known):
                    del _given[key]
            if id(group) not in _given:
                rank = distributed.get_rank(group)
                if rank < 0:
                    raise ValueError(
                        "this process is no rank of the process group: give a group to each of its ranks only"
                    )
                ranks = distributed.get_process_group_ranks(group)
                backends = _backends(group)
                timeout = _torch.group_timeout(group, torch.device(next(iter(backends)))).total_seconds()
                state = GroupState("given", ranks, rank, backends, timeout, group.get_group_store())
                _given[id(group)] = group, Machines(state, range(len(ranks)))
            return _given[id(group)][1]

    @property
    def epoch(self) -> int:
        """A step has that in which it begins."""
        return self.state.epoch

    def names(self, ranks: Iterable[int]) -> str:
        """Ranks of these machines in words, by their global numbers."""
        return of_ranks(self.ranks[rank] for rank in ranks)

    def describe(self) -> str:
        """The number of this machine, for messages."""
        return f"machine {self.rank} of {self.size}"

    # ---- lanes, and machines with other ranks: all ranks ask for them in one order

    def lane(self, purpose: str) -> Lane:
        """Makes a lane."""
        lane = Lane(self, purpose, self.state.lane_count)
        self.state.lane_count += 1
        self.state.lanes.add(lane)
        return lane

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def product(self, other: Machines) -> Machines:
        """All ranks of a mesh of which ``self`` is a row and ``other`` a column; the same object each time."""

        def make() -> Machines:
            rows = other.all_gather_object(self.ranks)
            ranks = sorted({rank for row in rows for rank in row})
            world: Any = distributed.group.WORLD
            place, store = ranks.index(distributed.get_rank()), world.get_group_store()
            with _lock:
                number = _products[tuple(ranks)] = _products.get(tuple(ranks), 0) + 1
            mine = self.state
            state = GroupState(f"product {number} {ranks}", ranks, place, mine.backends, mine.timeout, store)
            return Machines(state, range(len(ranks)))

        made: Machines = self._once(("product", *other.ranks), make)
        return made

    def part(self, ranks: Sequence[int]) -> Machines:
        """Some of the ranks, among them this one; the same object each time."""
        places = tuple(self.state.ranks.index(rank) for rank in ranks)
        made: Machines = self if places == self.places else self._once(places, lambda: Machines(self.state, places))
        return made

    # ---- devices

    def can_send(self, device: torch.device) -> bool:
        """True if tensors on the device are sent directly. Otherwise they go through host memory.

        gloo could take tensors of accelerators too, but no event of ours orders its copies.
        """
        return device == CPU or self.is_nccl(device)

    def is_nccl(self, device: torch.device) -> bool:
        """True if tensors on the device go through NCCL, whose collectives run on streams."""
        return self.state.backends.get(device.type) == "nccl"

    def nccl(self) -> Any:
        """The communicators of these ranks in this epoch, one for each device."""
        state = self.state
        if self.places not in state.nccl:
            store = distributed.distributed_c10d.PrefixStore(f"{state.epoch}/nccl/{self.places}", state.store)
            make: Any = distributed.ProcessGroupNCCL
            state.nccl[self.places] = make(store, self.rank, self.size, timedelta(seconds=state.timeout))
        return state.nccl[self.places]

    def make_communicators(self, devices: Iterable[torch.device]) -> None:
        """Makes NCCL's communicators for these devices now. Otherwise the first collective on a device would block.

        All ranks call it, in one order, with as many devices. It does nothing for other backends.
        """
        new = [each for each in dict.fromkeys(devices) if self._is_new(each)]
        if new:
            staged = [stage(self, torch.zeros(1, device=device)) for device in new]
            what = [f"the communicator of {device}" for device in new]
            calls = [partial(all_reduce, each) for each in staged]
            text = f"communicators for {len(new)} devices"
            for result in self.words.launch("communicators", what, calls, text, epoch=self.epoch):
                result.wait().item()
            self.note_communicators(new)

    def names_of(self, devices: Iterable[torch.device]) -> list[str]:
        """For each device a name such as ``cuda 0``. Ranks that send from devices of one name have one communicator.

        Names follow from the order in which devices come, and indices need not agree on the ranks. With NCCL, ranks
        that send from devices of different names would wait for each other for ever.
        """
        names = {**self._names}
        for device in devices:
            if device not in names:
                names[device] = f"{device.type} {sum(known.type == device.type for known in names)}"
        return [names[device] for device in devices]

    def note_communicators(self, devices: Sequence[torch.device]) -> None:
        """Notes the communicators that NCCL has for these devices, whose names all ranks have compared."""
        named = zip(devices, self.names_of(devices), strict=True)
        self._names |= {device: name for device, name in named if self._is_new(device)}

    def _is_new(self, device: torch.device) -> bool:
        return self.is_nccl(device) and device not in self._names

    # ---- what is sent outside of steps

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gathers a small object that can be pickled from each rank, in rank order. The calling thread waits."""
        found: list[Any] = self.words.gather("a word of each rank", "", value, epoch=self.epoch).wait()
        return found

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[size, *shape]``: the tensors of all machines, which have one shape and dtype. All ranks call it."""
        flat = tensor.detach().contiguous().view(-1)
        staged = stage(self, flat, self.size * flat.numel())  # here, where the current stream has computed it
        text = f"all_gather: {flat.numel()} x {flat.dtype} on {self.names_of([flat.device])[0]}"
        kind, calls = "an operator on sharded tensors", [partial(all_gather, staged)]
        (result,) = self._tensors.launch(kind, ["all_gather"], calls, f"{kind}\n{text}", epoch=self.epoch)
        gathered: Tensor = result.wait()
        self.note_communicators([flat.device])
        return gathered.view(self.size, *tensor.shape)


def _exists(group: Any) -> bool:
    try:
        return bool(distributed.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def _backends(group: distributed.ProcessGroup) -> dict[str, str]:
    """The backend for each type of device, from torch's configuration, such as ``cpu:gloo,cuda:nccl``."""
    found = {}
    for part in distributed.get_backend_config(group).split(","):
        device, _, name = part.partition(":")
        # gloo and NCCL are also configured for devices that they do not take.
        if name != "nccl" or device == "cuda":
            found[device] = name
    return found


@atexit.register
def _close_at_exit() -> None:
    issuer().close()
    own = [state for state in _states if state.is_of_this_process]
    for state in own:
        state.close()
    if own:
        _given.clear()  # torch ends the threads of a group when nobody holds it


@in_forked_child
def _start_afresh_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
