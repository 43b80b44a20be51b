"""The rounds of one pass of backward, one for each group that it adds up over: the shard group, the replicate group.

With both, a sum goes over the shard group first; the launcher of the other group waits for it. A group knows only what
its own ranks do, so the ends are told from one to the other: a machine that has learned in one group of a failure
fails in the other one. In the end all machines have failed, or none. Only ``units.sums_over_machines`` uses this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dataparallel.machines.collectives import Transfer
    from dataparallel.machines.group import Machines
    from dataparallel.machines.rounds import Launched, Round

__all__ = ["RoundsOverMachines"]

_KIND = "backward"


class RoundsOverMachines:
    """The rounds of one pass.

    Args:
        shard: the group over which sums are scattered, if any.
        replicate: the group over which they are the same afterwards, if the pass adds up over it.
    """

    def __init__(self, shard: Machines | None, replicate: Machines | None) -> None:
        self._shard, self._replicate = shard, replicate
        self._round_of: dict[Machines, Round] = {}

    def begin(self, contents: str) -> None:
        """Begins the rounds. ``contents`` has to be equal on all machines."""
        for machines in (self._shard, self._replicate):
            if machines is not None:
                self._round_of[machines] = machines.launcher.begin(_KIND, contents)

    def staged(self, total: Tensor, is_for_all: bool) -> Any:
        """The total for `sum`, staged on the current stream. ``is_for_all``: it goes over the replicate group too."""
        from dataparallel.machines.staging import stage

        first = self._shard or (self._replicate if is_for_all else None)
        return total if first is None else stage(first, total)

    def sum(self, what: str, staged: Any, is_for_all: bool) -> Any:
        """Has this machine's part of a sum made: of the shard group, then over the replicate group.

        Returns what has the part, or the part itself if there is no group to add up over.
        """
        from dataparallel.machines.collectives import all_reduce, reduce_scatter

        shard, replicate = self._shard, self._replicate
        scattered: Launched | None = None
        if shard is not None:
            scattered = self._round_of[shard].launch(what, lambda: reduce_scatter(shard, staged))
        if replicate is None or not is_for_all:
            return staged if scattered is None else scattered

        def over_replicate() -> Transfer:
            return all_reduce(replicate, staged if scattered is None else _or_zeros(scattered, staged, shard))

        return self._round_of[replicate].launch(what, over_replicate)

    def send_numbers(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Has the numbers of the first machine sent to all. The result waits for them."""
        from dataparallel.machines.collectives import broadcast

        last: Launched | None = None
        for machines in (self._replicate, self._shard):  # those of the first one's column, then all rows
            if machines is not None:
                own = torch.tensor(numbers, device=machines.small_device)

                def send(to: Machines = machines, before: Launched | None = last, own: Tensor = own) -> Transfer:
                    with suppress(RuntimeError):  # the end of the other group's round tells it
                        own = own if before is None else before.wait()
                    return broadcast(to, own)

                last = self._round_of[machines].launch("the order of units", send)
        return list if last is None else lambda: last.wait().tolist()

    def end(self, used: Sequence[bool]) -> Callable[[], list[bool]]:
        """Ends the rounds. The result waits for the ends, and says what any machine has used.

        With two groups this waits itself.

        Raises:
            dataparallel.machines.errors.MachinesError: with two groups, if a machine has failed or is gone.
        """
        if self._shard is not None and self._replicate is not None:
            found = self._end_both(self._shard, self._replicate, used)
            return lambda: found
        for round in self._round_of.values():
            wait: Callable[[], list[bool]] = round.end(used).wait
            return wait
        return lambda: [*used]

    def _end_both(self, shard: Machines, replicate: Machines, used: Sequence[bool]) -> list[bool]:
        try:
            used = self._round_of[shard].end(used).wait()
        except BaseException as error:
            self._round_of[replicate].end(used, error)
            raise
        failure: BaseException | None = None
        try:
            used = self._round_of[replicate].end(used).wait()
        except BaseException as error:
            failure = error
        # Others of the shard group may be in groups that have not failed.
        last = shard.launcher.begin(_KIND, "the end of both groups").end([], failure)
        if failure is not None:
            raise failure
        last.wait()
        return [*used]

    def fail(self, used: Sequence[bool], error: BaseException) -> None:
        """Ends the rounds: this machine has failed. ``used`` has as many entries as on the others. Nothing waits."""
        for machines in (self._shard, self._replicate):
            if machines is not None:
                self._round_of[machines].end(used, error)


def _or_zeros(scattered: Launched, staged: Any, shard: Machines | None) -> Tensor:
    """The part that the shard group has added up. If that has failed, zeros: the others wait for something."""
    assert shard is not None
    try:
        found: Tensor = scattered.wait()
    except RuntimeError:  # the end of the shard group's round tells it
        tensor: Tensor = staged.tensor
        found = tensor.new_zeros(tensor.numel() // shard.size)
    return found
