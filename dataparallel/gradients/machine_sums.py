"""What `replicate` does over machines with the sums over the slots, and what the machines agree on before a forward.

A forward without grad mode talks to no other machine, so one machine may evaluate alone. This file is imported where a
group or a mesh was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dataparallel.comm import nccl
from dataparallel.gradients.comm_hooks import Called, CommHook, GradBucket
from dataparallel.gradients.ordered_pass import Arriving, BucketSum
from dataparallel.machines.collectives import all_reduce, stage
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.group import Machines
from dataparallel.machines.rounds import PendingResult, Round
from dataparallel.machines.start import send_values


class _ReducerOverMachines:
    """What the reducers below have in common: each pass is a round of all machines."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines

    def _begin_round(self, contents: str) -> Round:
        return self._machines.queue.begin_round("backward", contents)

    def signal_failure(self, error: BaseException) -> None:
        """See `Reducer`. What all machines know of is not told again."""
        if not isinstance(error, MachinesError):
            self._machines.queue.signal_failure(error)


class MachineSums(_ReducerOverMachines):
    """A `Reducer`: the sums of all machines, divided by their number if ``average``."""

    def __init__(self, machines: Machines, average: bool) -> None:
        super().__init__(machines)
        self._average = average

    def begin_pass(self, contents: str) -> _MachinePass:
        """See `Reducer`."""
        return _MachinePass(self._machines, self._begin_round(contents), self._average)


class _MachinePass:
    """The `ReducerPass` of `MachineSums`."""

    def __init__(self, machines: Machines, round: Round, average: bool) -> None:
        self._machines, self._round, self._average = machines, round, average
        self.end_pass = round.end

    def launch(self, sums: BucketSum) -> Arriving:
        """See `ReducerPass`."""
        flat = sums.flat
        if self._average:
            flat.div_(self._machines.size)
        sent = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        # Staged here, where the current stream has made the sum.
        issue = partial(all_reduce, self._machines, stage(self._machines, sent))
        launched = self._round.launch(f"bucket {sums.index} of {sums.count}, with {sums.names[0]!r}", issue)
        return _Complex(launched) if flat.is_complex() else launched


class _Complex:
    """A sum of complex numbers, which travels as pairs of real ones."""

    def __init__(self, launched: Arriving) -> None:
        self._launched = launched

    def wait(self) -> Tensor:
        return torch.view_as_complex(self._launched.wait().view(-1, 2))


class HookedMachineSums(_ReducerOverMachines):
    """A `Reducer`: what a communication hook leaves. If it fails on a rank, no rank gets gradients.

    The issuing thread calls the hook for one bucket after the other, in the order that all machines have agreed on, so
    backward goes on meanwhile.
    """

    def __init__(self, machines: Machines, hook: CommHook) -> None:
        super().__init__(machines)
        self._hook = hook

    def begin_pass(self, contents: str) -> _HookedMachinePass:
        """See `Reducer`. The hook's name has to be the same on all ranks."""
        round = self._begin_round(f"{contents}\nthe communication hook {self._hook.name}")
        return _HookedMachinePass(self._machines, round, self._hook)


class _HookedMachinePass:
    """The `ReducerPass` of `HookedMachineSums`. The hook is called later: its errors come from the waits."""

    def __init__(self, machines: Machines, round: Round, hook: CommHook) -> None:
        self.machines, self.round, self.hook = machines, round, hook
        self.ended: PendingResult | None = None

    def launch(self, sums: BucketSum) -> _HookedBucket:
        """See `ReducerPass`."""
        return _HookedBucket(self, sums)

    def end_pass(self, used: Sequence[bool], error: BaseException | None = None) -> PendingResult:
        """See `ReducerPass`."""
        self.ended = self.round.end(used, error)
        return self.ended


class _HookedBucket:
    """One bucket, of which the hook gets a copy in host memory if the group cannot send it as it is."""

    def __init__(self, of_pass: _HookedMachinePass, sums: BucketSum) -> None:
        self._of_pass = of_pass
        self._called: Called | None = None
        self._staged = stage(of_pass.machines, sums.flat)
        self._bucket = GradBucket(sums.index, sums.count, self._staged.payload, sums.parameters, sums.names)
        what = f"the communication hook {of_pass.hook.name} for {self._bucket}"
        self._launched = of_pass.round.call(what, self._call_hook, self._check)

    def _call_hook(self) -> Any:
        staged, is_nccl = self._staged, self._of_pass.machines.is_nccl(self._staged.payload.device)
        if staged.is_copied and staged.event is not None:
            staged.event.synchronize()
        with nccl.launching() if is_nccl else nullcontext():
            self._called = Called(self._of_pass.hook, self._bucket, staged.event if is_nccl else None)
        return self._called.future

    def _check(self) -> None:
        """Raises if what the hook has left cannot be gradients."""
        assert self._called is not None
        self._called.check()

    def wait(self) -> Tensor:
        """The gradients, on the device of the sum and on the current stream."""
        try:
            self._launched.wait()
        except BaseException:
            # Until the launcher has ended the round: the error may make the caller send something over the same group.
            if self._of_pass.ended is not None:
                with suppress(Exception):
                    self._of_pass.ended.wait()
            raise
        assert self._called is not None
        found = self._called.wait()
        return self._staged.copy_result(found) if self._staged.is_copied else found


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
        first: list[int] = self._machines.queue.all_gather_object("order of buckets", contents, [*positions])[0]
        return first

    def signal_failure(self, error: BaseException) -> None:
        """A recorded forward has failed here. What all machines know of in this group is not told again."""
        if not isinstance(error, MachinesError) or error.is_of_peers:
            self._machines.queue.signal_failure(error)
