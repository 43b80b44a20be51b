"""`Machines`: the ranks of a process group, for one purpose. ``units`` and ``composable`` pass it around.

A group that the user has given is sent nothing. Beside it there is one group of ours that sends tensors, whatever
number of purposes there are: with NCCL that is one communicator for each device, made at the start. Each purpose has a
`Line` of rounds, and all of them share one `Health`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from dataparallel import _torch
from dataparallel.forks import in_forked_child
from dataparallel.machines.backend import Group
from dataparallel.machines.collectives import all_reduce
from dataparallel.machines.health import Health
from dataparallel.machines.launcher import launcher
from dataparallel.machines.line import Line
from dataparallel.machines.staging import stage

__all__ = ["Machines"]

_given: dict[int, Machines] = {}
"""Those of the users' groups, by the id of the group, which they hold: until it is destroyed, on all ranks alike."""
_lock = threading.Lock()


class Machines(Group):
    """The machines of a process group; see `Group` for what it tells. `of` makes it.

    Args:
        group: whose ranks they are, and which sends.
        health: of the group.
        number: of the purpose, among those of the group.

    Attributes:
        line: for the rounds of this purpose.
    """

    def __init__(self, group: distributed.ProcessGroup, health: Health | None = None, number: int = 0) -> None:
        super().__init__(group)
        self._health = health or Health(Group(group), launcher())
        self._health.include_group(self)
        self.line = Line(Group(group), self._health, f"{group.group_name}/{number}")
        self._sender: Sender | None = None
        self._own: dict[str, Machines] = {}

    @staticmethod
    def of(group: distributed.ProcessGroup | None = None) -> Machines:
        """The machines of the group, or of the default group. The same object until the group is destroyed.

        Raises:
            RuntimeError: without a group, if there is no default group.
            ValueError: if this process is no rank of the group.
        """
        if not distributed.is_available():
            raise RuntimeError("this build of torch has no torch.distributed, which machines need: install another one")
        if not distributed.is_initialized():
            raise RuntimeError(
                "there is no process group: call torch.distributed.init_process_group first, in a process for each "
                "machine (torchrun --nproc-per-node=1)"
            )
        if group is None:
            group = distributed.group.WORLD
            assert group is not None
        with _lock:
            for machines in [*_given.values()]:
                if not machines.exists:
                    del _given[id(machines.group)]
            found = _given.get(id(group))
            if found is None:
                found = _given[id(group)] = Machines(group)
            return found

    def another(self) -> Machines:
        """The same ranks for another purpose. All ranks of the group call it, in one order.

        Raises:
            RuntimeError: on every rank, if torch would give the group that sends different names on them.
            PeerGone: a rank did not come within the group's timeout.
        """
        if self._sender is None:
            self._sender = Sender(Group(self._with_ranks(self.ranks, [self])), self._health)
        return self._sender.another()

    def own(self, purpose: str) -> Machines:
        """`another` for a purpose that has a name: the same object each time."""
        if purpose not in self._own:
            self._own[purpose] = self.another()
        return self._own[purpose]

    def product(self, other: Machines) -> Machines:
        """All ranks of a mesh of which these are a row and ``other`` a column; the same object each time.

        Raises:
            RuntimeError, PeerGone: as `another`.
        """
        purpose = f"with {other.ranks}"
        if purpose not in self._own:
            rows = other.all_say(self.ranks)
            group = self._with_ranks(sorted({rank for row in rows for rank in row}), [self, other])
            self._own[purpose] = Sender(Group(group), Health(Group(group), launcher())).another()
        return self._own[purpose]

    def all_say(self, value: Any) -> list[Any]:
        """What each rank says, in their order; small, and can be pickled. The calling thread waits."""
        round = self.line.begin("a word of each rank", "")
        said = round.say("what the ranks say", lambda: value)
        round.close()
        found: list[Any] = said.wait()
        return found

    def make_communicators(self, devices: Iterable[torch.device]) -> None:
        """Makes what NCCL needs on these devices now, which would block the first collective of each otherwise.

        All ranks of the group call it, in one order, with as many devices. It does nothing for other backends.
        """
        sender = self._sender
        if sender is not None:
            sender.make_communicators(devices)

    def _with_ranks(self, ranks: list[int], groups: Sequence[Machines]) -> distributed.ProcessGroup:
        """A group of torch. ``groups``: those over which a word of one rank comes to all."""
        is_whole = len(ranks) == distributed.get_world_size()
        names = set() if is_whole else {_torch.name_of_group(ranks)}
        for known in () if is_whole else groups:
            names = names.union(*known.all_say(names))
        if len(names) > 1:
            raise RuntimeError(
                f"a second group of the ranks {ranks} is needed, and torch {torch.__version__} has different "
                "names for it on these ranks, because they are in different numbers of groups: make process groups so "
                "that every rank is in as many, as init_device_mesh does"
            )
        try:
            group: distributed.ProcessGroup = distributed.new_group(
                ranks,
                timeout=timedelta(seconds=self.timeout),
                backend=distributed.get_backend_config(self.group),
                use_local_synchronization=not is_whole,
            )
        except RuntimeError as error:  # the store's, after the group's timeout
            raise self._health.break_because(error, "the beginning of 'another group'") from error
        return group


class Sender:
    """The group that sends for all purposes of the same ranks.

    Args:
        group: of ours.
        health: of the ranks.
    """

    def __init__(self, group: Group, health: Health) -> None:
        self._group, self._health, self._count = group, health, 0
        health.include_group(group)
        self._has_communicators: set[torch.device] = set()
        self._first: Machines | None = None

    def another(self) -> Machines:
        """See `Machines.another`."""
        machines = Machines(self._group.group, self._health, self._count)
        machines._sender = self
        self._count += 1
        self._first = self._first or machines
        return machines

    def make_communicators(self, devices: Iterable[torch.device]) -> None:
        """See `Machines.make_communicators`."""
        first = self._first
        assert first is not None
        new = [each for each in dict.fromkeys(devices) if first.is_nccl(each) and each not in self._has_communicators]
        if not new:
            return
        round = first.line.begin("communicators", f"for {len(new)} devices")
        staged = [stage(first, torch.zeros(1, device=device)) for device in new]
        launched = round.launch_together(
            [f"the communicator of {device}" for device in new], [partial(all_reduce, first, each) for each in staged]
        )
        round.end([]).wait()
        for each in launched:
            each.wait().item()
        self._has_communicators.update(new)


@in_forked_child
def _start_afresh_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
