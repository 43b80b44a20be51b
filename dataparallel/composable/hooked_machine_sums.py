"""A communication hook after the slots, with machines: `HookedMachineSums` is the `AfterSlots` of such a module.

The issuing thread calls the hook for one bucket after the other, in the order that all machines have agreed on, so
backward goes on meanwhile. What the hook sends may go over the machines' own group: nothing else is issued on it until
the hook's future is done. Nothing is added over machines besides: what the hook leaves are the gradients.

If the group cannot send the tensors of a device, the hook gets the bucket in host memory. ``composable.comm_hooks``
orders the streams otherwise. If the hook fails on a rank, no rank gets gradients (``machines.hook_calls``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from dataparallel.comm import nccl
from dataparallel.composable.after_slots import BucketSum
from dataparallel.composable.comm_hooks import Called, CommHook, GradBucket
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.group import Machines
from dataparallel.machines.hook_calls import HookCall, HookCalls
from dataparallel.machines.rounds import Launched, Round
from dataparallel.machines.staging import Staged, stage

__all__ = ["HookedMachineSums"]


class HookedMachineSums:
    """The `AfterSlots` of a hook, for a module that spans machines."""

    def __init__(self, hook: CommHook, machines: Machines) -> None:
        self.hook, self.machines = hook, machines
        self.calls = HookCalls()

    def begin(self, contents: str) -> _Pass:
        """See `AfterSlots`. The hook's name has to be the same on all ranks."""
        round = self.machines.line.begin("backward", f"{contents}\nthe communication hook {self.hook.name}")
        return _Pass(self, round)

    def signal_failure(self, error: BaseException) -> None:
        """See `AfterSlots`. What all machines know of is not told again."""
        if not isinstance(error, MachinesError):
            self.machines.line.signal_failure(error)


class _Pass:
    """A `Backward`."""

    def __init__(self, sums: HookedMachineSums, round: Round) -> None:
        self._sums, self._round = sums, round
        self._end: Launched | None = None

    def launch(self, sums: BucketSum) -> _Arriving:
        """See `Backward`. The hook is called later: its errors come from the waits."""
        staged = stage(self._sums.machines, sums.flat)
        bucket = GradBucket(sums.index, sums.count, staged.host, sums.parameters, sums.names)
        arriving = _Arriving(self, self._sums, staged, bucket)
        what = f"the communication hook {self._sums.hook.name} for {bucket}"
        arriving.call = self._sums.calls.call(self._round, what, arriving.begin, arriving.check)
        return arriving

    def end(self, used: Sequence[bool], error: BaseException | None = None) -> Launched:
        """See `Backward`."""
        self._end = self._round.end(used, error)
        return self._end

    def wait_for(self, call: HookCall) -> None:
        """Blocks until a call has succeeded on all machines.

        If it has not, this also waits until the launcher has ended the round: the error may make the caller send
        something over the same group.
        """
        try:
            call.wait()
        except BaseException:
            if self._end is not None:
                with suppress(Exception):
                    self._end.wait()
            raise


class _Arriving:
    """One bucket. The issuing thread calls `begin` and `check`."""

    call: HookCall

    def __init__(self, backward: _Pass, sums: HookedMachineSums, staged: Staged, bucket: GradBucket) -> None:
        self._backward, self._sums, self._staged, self._bucket = backward, sums, staged, bucket
        self._called: Called | None = None

    def begin(self) -> Any:
        """Calls the hook, and returns its future."""
        staged, machines = self._staged, self._sums.machines
        if staged.is_copied and staged.event is not None:
            staged.event.synchronize()
        if machines.is_nccl(staged.host.device):
            with nccl.launching():
                self._called = Called(self._sums.hook, self._bucket, staged.event)
        else:
            self._called = Called(self._sums.hook, self._bucket)
        return self._called.future

    def check(self) -> None:
        """Raises if what the hook has left cannot be gradients."""
        assert self._called is not None
        self._called.check()

    def wait(self) -> Tensor:
        """The gradients, on the device of the sum and on the current stream."""
        self._backward.wait_for(self.call)
        assert self._called is not None
        found = self._called.wait()
        return self._staged.arrive(found) if self._staged.is_copied else found
