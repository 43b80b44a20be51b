"""`MachineSums` reduces gradients over machines. `replicate` imports this file only if a group or a mesh was given."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from dataparallel.gradients.comm_hooks import CommHook, GradBucket, HookCall
from dataparallel.gradients.ordered_pass import AsyncResult
from dataparallel.machines.collectives import stage
from dataparallel.machines.lanes import Lane, launching

_BACKWARD = "backward"

_PATIENCE = 10.0
"""Seconds that a pass which has failed waits for the hooks of the buckets that it has launched."""


class MachineSums:
    """A `Reducer` over all machines: it sums buckets, and divides by their number if ``average``, or calls ``hook``.

    The issuing thread calls the hook, in the order of buckets, beside the backward. If the hook fails on one rank, no
    rank gets gradients.
    """

    def __init__(self, lane: Lane, average: bool, hook: CommHook | None = None) -> None:
        self.lane, self.average, self.hook = lane, average, hook

    def begin_pass(self, contents: str) -> _MachinePass:
        """See `Reducer`. Ranks compare the contents, with the hook's name, when they are new."""
        if self.hook is not None:
            contents += f"\nthe communication hook {self.hook.name}"
        return _MachinePass(self, f"{_BACKWARD}\n{contents}")


class _MachinePass:
    """The `ReducerPass` of `MachineSums`. `launch` does not call a hook yet, so ``wait`` raises its errors."""

    def __init__(self, sums: MachineSums, contents: str) -> None:
        self.lane, self.machines, self._average, self._hook = sums.lane, sums.lane.machines, sums.average, sums.hook
        self.epoch, self.contents = self.machines.begin_pass(), contents
        self._hooked: list[_HookedResult] = []

    def launch(self, bucket: GradBucket) -> AsyncResult:
        text = self.contents if bucket.index() == 0 else f"{_BACKWARD}\nbucket {bucket}"
        if self._hook is not None:
            self._hooked.append(_HookedResult(self, self._hook, bucket, text))
            return self._hooked[-1]
        if self._average:
            bucket.summed.div_(self.machines.size)
        # `stage` is called here, because the current stream has made the sum.
        what = [f"bucket {bucket.index()} of {bucket.count}, with {bucket.names[0]!r}"]
        staged, device = [stage(self.machines, bucket.summed)], bucket.summed.device
        return self.lane.add_sums(_BACKWARD, what, staged, device, text=text, epoch=self.epoch)[0]

    def end_pass(self, used: Sequence[bool], order: Sequence[int] | None) -> AsyncResult:
        """See `ReducerPass`. The mask travels last: no rank uses a sum before all ranks have sent all of theirs."""
        return self.lane.end(_BACKWARD, used, epoch=self.epoch, extra=order)

    def fail(self, error: BaseException, missing: Iterator[GradBucket]) -> None:
        """See `ReducerPass`. The other ranks call the hooks that this one has launched, so it calls them first."""
        until = time.monotonic() + _PATIENCE
        for each in self._hooked:
            each.launched.settle(until - time.monotonic())
        self.machines.state.leave(self.epoch, error)


class _HookedResult:
    """The `AsyncResult` of one bucket. The hook gets a copy in host memory if no backend sends from its device."""

    def __init__(self, of_pass: _MachinePass, hook: CommHook, bucket: GradBucket, text: str) -> None:
        self._machines, self._hook = of_pass.machines, hook
        self._hook_call: HookCall | None = None
        self._staged = stage(of_pass.machines, bucket.summed)
        self._bucket = bucket.over(self._staged.payload)
        what = f"the communication hook {hook.name} for {self._bucket}"
        self.launched = of_pass.lane.call(_BACKWARD, what, self._call_hook, self._check, epoch=of_pass.epoch, text=text)

    def _call_hook(self) -> Any:
        staged, is_nccl = self._staged, self._machines.is_nccl(self._staged.payload.device)
        if staged.is_copied and staged.event is not None:
            staged.event.synchronize()
        with launching if is_nccl else nullcontext():
            self._hook_call = HookCall(self._hook, self._bucket, staged.event if is_nccl else None)
        return self._hook_call.future

    def _check(self) -> None:
        assert self._hook_call is not None
        self._hook_call.check()

    def wait(self) -> Tensor:
        """Returns the gradients, on the device of the sum and on the current stream."""
        self.launched.wait()
        assert self._hook_call is not None
        grads = self._hook_call.wait()
        return self._staged.copy_result(grads) if self._staged.is_copied else grads
