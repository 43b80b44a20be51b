"""The rounds of one pass of backward, one for each group that it adds up over: the shard group, the replicate group.

With both, a sum goes over the shard group first, and then over the other one. A group knows only what
its own ranks do, so the ends are told from one to the other: a machine that has learned in one group of a failure
fails in the other one. In the end all machines have failed, or none. Only ``units.sums_over_machines`` uses this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dataparallel.machines.collectives import Transfer
    from dataparallel.machines.group import Machines
    from dataparallel.machines.rounds import Launched, Round
    from dataparallel.machines.staging import Staged

__all__ = ["RoundsOverMachines"]

_KIND = "backward"


class RoundsOverMachines:
    """The rounds of one pass.

    Args:
        shard: the group over which sums are scattered, if any.
        replicate: the group over which they are the same afterwards, if the pass adds up over it.
        computing: the streams on which sums are taken.
    """

    def __init__(
        self,
        shard: Machines | None,
        replicate: Machines | None,
        computing: Mapping[torch.device, torch.Stream],
    ) -> None:
        self._shard, self._replicate, self._computing = shard, replicate, computing
        self._round_of: dict[Machines, Round] = {}

    def begin(self, contents: str) -> None:
        """Begins the rounds. ``contents`` has to be equal on all machines."""
        for machines in (self._shard, self._replicate):
            if machines is not None:
                self._round_of[machines] = machines.line.begin(_KIND, contents)

    def staged(self, total: Tensor, is_for_all: bool) -> Any:
        """The total for `sum`, staged on the current stream. ``is_for_all``: it goes over the replicate group too."""
        from dataparallel.machines.staging import stage

        if self._shard is not None:
            return stage(self._shard, total, total.numel() // self._shard.size, self._computing)
        return stage(self._replicate, total) if self._replicate is not None and is_for_all else total

    def sum(self, what: str, staged: Sequence[Any], is_for_all: bool) -> list[Any]:
        """Has this machine's parts of sums made: of the shard group, then over the replicate group.

        ``staged``: those of all owners, which are sent together. Returns for each what has the part, or the part itself
        if there is no group to add up over.
        """
        from dataparallel.machines.collectives import all_reduce, reduce_scatter

        shard, replicate, found = self._shard, self._replicate, [*staged]
        calls: list[Callable[[], Transfer]]
        if shard is not None:
            calls = [partial(reduce_scatter, shard, each) for each in staged]
            found = self._round_of[shard].launch_together([what] * len(calls), calls)
        if replicate is None or not is_for_all:
            return found
        if shard is None:
            calls = [partial(all_reduce, replicate, each) for each in staged]
            return self._round_of[replicate].launch_together([what] * len(calls), calls)
        calls = [partial(_sum_of_part, replicate, *each) for each in zip(found, staged, strict=True)]
        return self._round_of[replicate].launch_together([what] * len(calls), calls, after=found)

    def send_numbers(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Has the numbers of the first machine sent to all. The result waits for them."""
        last: Launched | None = None
        for machines in (self._replicate, self._shard):  # those of the first one's column, then all rows
            if machines is not None:
                after = [] if last is None else [last]
                last = self._round_of[machines].say("the order of units", partial(_first, numbers, last), after)
        return list if last is None else partial(_first, numbers, last)

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
        last = shard.line.begin(_KIND, "the end of both groups").end([], failure)
        if failure is not None:
            raise failure
        last.wait()
        return [*used]

    def fail(self, used: Sequence[bool], error: BaseException) -> None:
        """Ends the rounds: this machine has failed. ``used`` has as many entries as on the others. Nothing waits."""
        for machines in (self._shard, self._replicate):
            if machines is not None:
                self._round_of[machines].end(used, error)


def _sum_of_part(replicate: Machines, scattered: Launched, staged: Staged) -> Transfer:
    """The sum of a part that the shard group has added up. If that has failed, anything: the others wait for it."""
    from dataparallel.machines.collectives import all_reduce

    try:
        part = scattered.received()
    except RuntimeError:  # the end of the shard group's round tells it
        assert staged.room is not None
        part = staged.with_host(staged.room)
    return all_reduce(replicate, part)


def _first(numbers: Sequence[int], said: Launched | None) -> list[int]:
    """What the first machine has said; ``numbers`` if that has failed, which the end of its round tells."""
    with suppress(RuntimeError):
        return [*numbers] if said is None else said.wait()[0]
    return [*numbers]
