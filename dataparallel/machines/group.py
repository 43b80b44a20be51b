"""`Machines`: one object for each process group in this process. ``units`` and ``composable`` pass it around."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed

from dataparallel import _torch
from dataparallel.forks import in_forked_child
from dataparallel.machines.backend import Group
from dataparallel.machines.collectives import all_gather_objects
from dataparallel.machines.launcher import Launcher

__all__ = ["Machines"]

_made: weakref.WeakValueDictionary[int, Machines] = weakref.WeakValueDictionary()
_launchers: weakref.WeakValueDictionary[int, Launcher] = weakref.WeakValueDictionary()
"""By the id of their group, which they hold. One may have rounds to end when nobody holds its `Machines` any more."""
_lock = threading.Lock()


class Machines(Group):
    """The machines of a process group; see `Group` for what it tells. `of` makes it."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        super().__init__(group)
        self._launcher: Launcher | None = None
        self._process = os.getpid()

    @staticmethod
    def of(group: distributed.ProcessGroup | None = None) -> Machines:
        """The machines of the group, or of the default group. The same object for as long as somebody holds it.

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
            machines = _made.get(id(group))  # it holds the group, so the id is not another group's
            if machines is None:
                machines = _made[id(group)] = Machines(group)
            return machines

    @property
    def launcher(self) -> Launcher:
        """The group's launcher, made when it is first asked for."""
        with _lock:
            if self._launcher is None:
                self._launcher = _launchers.get(id(self.group))
            if self._launcher is None:
                # Not this object: the launcher's thread holds the group, and this object holds the launcher.
                self._launcher = _launchers[id(self.group)] = Launcher(Group(self.group))
            return self._launcher

    def another(self) -> Machines:
        """The same ranks with a group of their own: the same backend and timeout. All ranks of the group call it.

        Raises:
            RuntimeError: on every rank, if torch would give the new group different names on them.
            PeerGone: a rank did not come within the group's timeout.
        """
        return self._with_ranks(self.ranks, [self])

    def product(self, other: Machines) -> Machines:
        """A group of all ranks of a mesh of which this group is a row and ``other`` a column. All of them call it.

        Raises:
            RuntimeError, PeerGone: as `another`.
        """
        rows = all_gather_objects(other, self.ranks)
        return self._with_ranks(sorted({rank for row in rows for rank in row}), [self, other])

    def _with_ranks(self, ranks: list[int], groups: Sequence[Machines]) -> Machines:
        """``groups``: those over which a word of one rank comes to all."""
        is_whole = len(ranks) == distributed.get_world_size()
        names = set() if is_whole else {_torch.name_of_group(ranks)}
        for known in () if is_whole else groups:
            names = names.union(*all_gather_objects(known, names))
        if len(names) > 1:
            raise RuntimeError(
                f"a second group of the ranks {ranks} is needed, and torch {torch.__version__} has different "
                "names for it on these ranks, because they are in different numbers of groups: make process groups so "
                "that every rank is in as many, as init_device_mesh does"
            )
        try:
            group = distributed.new_group(
                ranks,
                timeout=timedelta(seconds=self.timeout),
                backend=distributed.get_backend_config(self.group),
                use_local_synchronization=not is_whole,
            )
        except RuntimeError as error:  # the store's, after the group's timeout
            raise self.launcher.give_up(error, "the beginning of 'another group'") from error
        return Machines.of(group)


@in_forked_child
def _start_afresh_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
