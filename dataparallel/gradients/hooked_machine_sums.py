"""A communication hook after the slots, with machines: `HookedMachineSums` is the `AfterSlots` of such a module.

The issuing thread calls the hook for one bucket after the other, in the order that all machines have agreed on, so
backward goes on meanwhile. What the hook leaves are the gradients. If it fails on a rank, no rank gets gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

from torch import Tensor

from dataparallel.comm import nccl
from dataparallel.gradients.after_slots import BucketSum
from dataparallel.gradients.comm_hooks import Called, CommHook, GradBucket
from dataparallel.machines.collectives import stage
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.group import Machines
from dataparallel.machines.rounds import Launched, Round


class HookedMachineSums:
    """The `AfterSlots` of a hook, for a module that spans machines."""

    def __init__(self, hook: CommHook, machines: Machines) -> None:
        self._hook, self._machines = hook, machines

    def begin(self, contents: str) -> _Pass:
        """See `AfterSlots`. The hook's name has to be the same on all ranks."""
        contents = f"{contents}\nthe communication hook {self._hook.name}"
        return _Pass(self._hook, self._machines, self._machines.queue.begin_round("backward", contents))

    def signal_failure(self, error: BaseException) -> None:
        """See `AfterSlots`. What all machines know of is not told again."""
        if not isinstance(error, MachinesError):
            self._machines.queue.signal_failure(error)


class _Pass:
    """A `Backward`."""

    def __init__(self, hook: CommHook, machines: Machines, round: Round) -> None:
        self.hook, self.machines, self.round = hook, machines, round
        self.ended: Launched | None = None

    def launch(self, sums: BucketSum) -> _Arriving:
        """See `Backward`. The hook is called later: its errors come from the waits."""
        return _Arriving(self, sums)

    def end(self, used: Sequence[bool], error: BaseException | None = None) -> Launched:
        """See `Backward`."""
        self.ended = self.round.end(used, error)
        return self.ended


class _Arriving:
    """One bucket, of which the hook gets a copy in host memory if the group cannot send it as it is."""

    def __init__(self, backward: _Pass, sums: BucketSum) -> None:
        self._pass = backward
        self._called: Called | None = None
        self._staged = stage(backward.machines, sums.flat)
        self._bucket = GradBucket(sums.index, sums.count, self._staged.host, sums.parameters, sums.names)
        what = f"the communication hook {backward.hook.name} for {self._bucket}"
        self._launched = backward.round.call(what, self._begin, self._check)

    def _begin(self) -> Any:
        staged, is_nccl = self._staged, self._pass.machines.is_nccl(self._staged.host.device)
        if staged.is_copied and staged.event is not None:
            staged.event.synchronize()
        with nccl.launching() if is_nccl else nullcontext():
            self._called = Called(self._pass.hook, self._bucket, staged.event if is_nccl else None)
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
            if self._pass.ended is not None:
                with suppress(Exception):
                    self._pass.ended.wait()
            raise
        assert self._called is not None
        found = self._called.wait()
        return self._staged.arrive(found) if self._staged.is_copied else found
