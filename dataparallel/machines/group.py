"""`Machines`: the ranks of a process group, for one purpose, with a queue of rounds.

No tensor is sent over the user's group. Beside it the library makes a group of its own, so that with NCCL there is one
communicator for each device, made at the start. The own group always has gloo for host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, distributed

from dataparallel import _torch
from dataparallel.devices import CPU
from dataparallel.forks import in_forked_child
from dataparallel.machines.agreement import connecting, of_ranks
from dataparallel.machines.collectives import all_gather, all_reduce, stage
from dataparallel.machines.health import Health
from dataparallel.machines.launcher import launcher
from dataparallel.machines.rounds import RoundQueue

_given: dict[int, Machines] = {}
"""The `Machines` of users' groups, by the group's id. They hold the group until it is destroyed, on all ranks alike."""
_lock = threading.Lock()


class MachineGroup:
    """The properties of a process group of torch: its ranks, its timeout, and the devices whose tensors it sends."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no rank of the process group: give a group to each of its ranks only")
        self.ranks = distributed.get_process_group_ranks(group)  # global ranks, which messages name
        self.backends = _backends(group)  # by type of device
        self.timeout = _torch.group_timeout(group, torch.device(next(iter(self.backends)))).total_seconds()

    def can_send(self, device: torch.device) -> bool:
        """True if the group can send tensors on the device directly. Otherwise they go through host memory.

        gloo could take tensors of accelerators too, but no event of ours orders its copies. So it gets them in host
        memory.
        """
        return (device == CPU and CPU.type in self.backends) or self.is_nccl(device)

    def is_nccl(self, device: torch.device) -> bool:
        """True if tensors on the device go through NCCL, whose collectives run on streams."""
        return self.backends.get(device.type) == "nccl"

    @property
    def exists(self) -> bool:
        try:
            return distributed.get_process_group_ranks(self.group) == self.ranks
        except (KeyError, ValueError):
            return False

    @property
    def has_nccl(self) -> bool:
        """True if tensors on some type of device go through NCCL."""
        return "nccl" in self.backends.values()

    @cached_property
    def store(self) -> Any:
        world: Any = distributed.group.WORLD
        return world.get_group_store()

    def names(self, ranks: list[int]) -> str:
        """Ranks of the group in words, by their global numbers."""
        return of_ranks(self.ranks[rank] for rank in ranks)


class Machines(MachineGroup):
    """The machines of a process group for one purpose, which has a number and a queue of rounds of its own."""

    def __init__(self, group: distributed.ProcessGroup, health: Health | None = None, number: int = 0) -> None:
        super().__init__(group)
        plain = MachineGroup(group)  # the queue and the health may outlive this object, so they do not hold it
        self._health = health or Health(plain, launcher())
        self.queue = RoundQueue(plain, self._health, f"{group.group_name}/{number}")
        self._health.include(self.queue, plain, self)
        self._sender: Machines | None = None  # the first `Machines` of the group that sends
        self._purposes = 1  # of a sender: how many `Machines` share its group
        self._names: dict[torch.device, str] = {}  # of a sender: the devices that have a communicator of NCCL
        self._by_purpose: dict[str, Machines] = {}

    @staticmethod
    def of(group: distributed.ProcessGroup) -> Machines:
        """The machines of the group: the same object each time, until the group is destroyed."""
        with _lock:
            for machines in [*_given.values()]:
                if not machines.exists:
                    del _given[id(machines.group)]
            found = _given.get(id(group))
            if found is None:
                found = _given[id(group)] = Machines(group)
            return found

    # ---- machines for other purposes, or with other ranks

    def another(self) -> Machines:
        """Makes machines of the same ranks for another purpose. All ranks of the group call it, in one order."""
        sender = self._sender
        if sender is None:
            self._sender = self._sending(self._with_ranks(self.ranks, [self]), self._health)
            return self._sender
        machines = Machines(sender.group, sender._health, sender._purposes)
        machines._sender = sender
        sender._purposes += 1
        return machines

    def own(self, purpose: str) -> Machines:
        """As `another`, for a purpose that has a name: the same object each time."""
        if purpose not in self._by_purpose:
            self._by_purpose[purpose] = self.another()
        return self._by_purpose[purpose]

    def product(self, other: Machines) -> Machines:
        """All ranks of a mesh of which ``self`` is a row and ``other`` a column; the same object each time."""
        purpose = f"with {other.ranks}"
        if purpose not in self._by_purpose:
            rows = other.all_gather_object(self.ranks)
            group = self._with_ranks(sorted({rank for row in rows for rank in row}), [self, other])
            self._by_purpose[purpose] = self._sending(group)
        return self._by_purpose[purpose]

    def part(self, ranks: list[int]) -> Machines:
        """Some of the ranks, among them this one; the same object each time. All ranks call it, in one order.

        A failure among these ranks breaks the whole group, because both share one health.
        """
        if ranks == self.ranks:
            return self.own("a part")
        purpose = f"of {ranks}"
        if purpose not in self._by_purpose:
            self._by_purpose[purpose] = self._sending(self._with_ranks(ranks, [self]), self._health)
        return self._by_purpose[purpose]

    def make_communicators(self, devices: Iterable[torch.device]) -> None:
        """Makes NCCL's communicators for these devices now. Otherwise the first collective on a device would block.

        All ranks of the group call it, in one order, with as many devices. It does nothing for other backends.
        """
        sender, devices = self._sender, [*devices]
        new = [] if sender is None else [each for each in dict.fromkeys(devices) if sender._is_new(each)]
        if sender is None or not new:
            return
        this_round = sender.queue.begin_round("communicators", f"for {len(new)} devices")
        staged = [stage(sender, torch.zeros(1, device=device)) for device in new]
        results = this_round.launch_together(
            [f"the communicator of {device}" for device in new], [partial(all_reduce, sender, each) for each in staged]
        )
        this_round.end([]).wait()
        for result in results:
            result.wait().item()
        self.note_communicators(devices)

    def names_of(self, devices: Iterable[torch.device]) -> list[str]:
        """For each device a name such as ``cuda 0``. Ranks that send from devices of one name have one communicator.

        Names follow from the order in which devices come, and indices need not agree on the ranks. With NCCL, ranks
        that send from devices of different names would wait for each other for ever.
        """
        names = {} if self._sender is None else {**self._sender._names}
        for device in devices:
            if device not in names:
                names[device] = f"{device.type} {sum(known.type == device.type for known in names)}"
        return [names[device] for device in devices]

    def note_communicators(self, devices: Sequence[torch.device]) -> None:
        """Notes the communicators that NCCL has for these devices, whose names all ranks have compared."""
        sender = self._sender
        if sender is not None:
            named = zip(devices, self.names_of(devices), strict=True)
            sender._names |= {device: name for device, name in named if sender._is_new(device)}

    def _is_new(self, device: torch.device) -> bool:
        return self.is_nccl(device) and device not in self._names

    @staticmethod
    def _sending(group: distributed.ProcessGroup, health: Health | None = None) -> Machines:
        machines = Machines(group, health)
        machines._sender = machines
        return machines

    def _with_ranks(self, ranks: list[int], groups: Sequence[Machines]) -> distributed.ProcessGroup:
        """Makes a group of torch. ``groups``: the machines over which the ranks compare the name of the new group."""
        is_whole = len(ranks) == distributed.get_world_size()
        names = {tuple(ranks): {"" if is_whole else _torch.name_of_group(ranks)}}
        for known in () if is_whole else groups:
            for said in known.all_gather_object(names):
                names |= {each: names.get(each, set()) | found for each, found in said.items()}
        for each, found in names.items():
            if len(found) > 1:
                raise RuntimeError(
                    f"a second group of the ranks {[*each]} is needed, and torch {torch.__version__} has different "
                    "names for it on these ranks, because they are in different numbers of groups: make process groups "
                    "so that every rank is in as many, as init_device_mesh does"
                )
        backend = distributed.get_backend_config(self.group)
        try:
            with connecting(), _bound_to_no_device():
                group: distributed.ProcessGroup = distributed.new_group(
                    ranks,
                    timeout=timedelta(seconds=self.timeout),
                    backend=backend if CPU.type in self.backends else f"cpu:gloo,{backend}",
                    use_local_synchronization=not is_whole,
                )
        except RuntimeError as error:  # the store's, after the group's timeout
            raise self._health.break_for_lost_peer(error, "the beginning of 'another group'") from error
        return group

    # ---- small rounds

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gathers a small object that can be pickled from each rank, in rank order. The calling thread waits."""
        return self.queue.all_gather_object("a word of each rank", "", value)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[size, *shape]``: the tensors of all machines, which have one shape and dtype. All ranks call it."""
        flat = tensor.detach().contiguous().view(-1)
        staged = stage(self, flat, self.size * flat.numel())  # here, where the current stream has computed it
        contents = f"all_gather: {flat.numel()} x {flat.dtype} on {self.names_of([flat.device])[0]}"
        this_round = self.queue.begin_round("an operator on sharded tensors", contents)
        result = this_round.launch("all_gather", lambda: all_gather(self, staged))
        this_round.close()
        gathered: Tensor = result.wait()
        self.note_communicators([flat.device])
        return gathered.view(self.size, *tensor.shape)

    def describe(self) -> str:
        """The number of this machine, for messages."""
        return f"machine {self.rank} of {self.size}"


@contextmanager
def _bound_to_no_device() -> Iterator[None]:
    """Inside, torch makes groups as if ``init_process_group`` had got no ``device_id``.

    With one, torch at once splits NCCL's communicator of all ranks. That waits for all ranks of the job, and only the
    ranks of the new group come. The group could send from this device only, and here a process may have several.
    """
    world: Any = distributed.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _backends(group: distributed.ProcessGroup) -> dict[str, str]:
    """The backend for each type of device, from torch's configuration, such as ``cpu:gloo,cuda:nccl``."""
    found = {}
    for part in distributed.get_backend_config(group).split(","):
        device, _, name = part.partition(":")
        # gloo and NCCL are also configured for devices that they do not take.
        if name != "nccl" or device == "cuda":
            found[device] = name
    return found


@in_forked_child
def _start_afresh_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
