"""What `replicate` does over machines: it adds the sums of all machines, and has them agree before a recorded forward.

A forward without grad mode talks to no other machine, so one machine may evaluate alone. This file is imported where a
group or a mesh was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel.gradients.after_slots import Arriving, BucketSum
from dataparallel.machines.arguments import machines_of
from dataparallel.machines.collectives import all_reduce, stage
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.group import Machines
from dataparallel.machines.rounds import Round
from dataparallel.machines.start import failing_together, send_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def machines_for(
    process_group: ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[Machines | None, AbstractContextManager[None]]:
    """The machines of a group or a mesh, and a context in which errors here are errors of all ranks."""
    machines = machines_of(process_group, mesh)
    return machines, failing_together(machines)


class MachineSums:
    """An `AfterSlots`: the sums of all machines, divided by their number if ``average``."""

    def __init__(self, machines: Machines, average: bool) -> None:
        self._machines, self._average = machines, average

    def begin(self, contents: str) -> _Backward:
        """A pass begins."""
        round = self._machines.queue.begin_round("backward", contents)
        return _Backward(self._machines, round, self._average)

    def signal_failure(self, error: BaseException) -> None:
        """A pass has failed before it began, or a recorded forward has. What all machines know of is not told again."""
        if not isinstance(error, MachinesError):
            self._machines.queue.signal_failure(error)


class _Backward:
    def __init__(self, machines: Machines, round: Round, average: bool) -> None:
        self._machines, self._average = machines, average
        self.end = round.end
        self._round = round

    def launch(self, sums: BucketSum) -> Arriving:
        flat = sums.flat
        if self._average:
            flat.div_(self._machines.size)
        sent = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        # Staged here, where the current stream has made the sum.
        issue = partial(all_reduce, self._machines, stage(self._machines, sent))
        what = f"bucket {sums.index} of {sums.count}, with {sums.names[0]!r}"
        launched = self._round.launch(what, issue)
        return _Complex(launched) if flat.is_complex() else launched


class _Complex:
    """A sum of complex numbers, which travels as pairs of real ones."""

    def __init__(self, launched: Arriving) -> None:
        self._launched = launched

    def wait(self) -> Tensor:
        return torch.view_as_complex(self._launched.wait().view(-1, 2))


class Agreement:
    """What the machines agree on before a recorded forward."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines

    def send_buffers(self, named: Mapping[str, Tensor]) -> None:
        """Gives buffers the values of rank 0, as slots get those of slot 0: their versions stay as they are.

        So a graph that saved a buffer can still run its backward. The copies run on the current streams.
        """
        if named:
            send_values(self._machines, {name: tensor.data for name, tensor in named.items()})

    def order(self, positions: Sequence[int]) -> list[int]:
        """Rank 0's order of tensors that all machines have."""
        contents = f"{len(positions)} parameters"
        first: list[int] = self._machines.queue.all_say("order of buckets", contents, [*positions])[0]
        return first

    def signal_failure(self, error: BaseException) -> None:
        """A recorded forward has failed here. What all machines know of in this group is not told again."""
        if not isinstance(error, MachinesError) or error.is_of_peers:
            self._machines.queue.signal_failure(error)
