"""`MachineSums` reduces gradients over machines. `replicate` imports this file only if a group or a mesh was given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from dataparallel.gradients.comm_hooks import CommHook, GradBucket, HookCall
from dataparallel.gradients.ordered_pass import AsyncResult
from dataparallel.machines.collectives import Transfer, stage
from dataparallel.machines.lanes import Lane

_BACKWARD = "backward"


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
        self._sums, self._lane, self._contents = sums, sums.lane, contents

    def launch(self, bucket: GradBucket) -> AsyncResult:
        text = self._contents if bucket.index() == 0 else f"{_BACKWARD}\nbucket {bucket}"
        machines, hook = self._lane.machines, self._sums.hook
        if hook is None and self._sums.average:
            bucket.summed.div_(machines.size)
        staged = stage(machines, bucket.summed)  # here, because the current stream has made the sum
        if hook is not None:
            return _HookedResult(self._lane, hook, bucket, staged, text)
        what = f"bucket {bucket.index()} of {bucket.count}, with {bucket.names[0]!r}"
        return self._lane.launch(_BACKWARD, [what], [staged.sum], text)[0]

    def end_pass(self, used: Sequence[bool], order: Sequence[int] | None) -> AsyncResult:
        """See `ReducerPass`. The mask travels last: no rank uses a sum before all ranks have sent all of theirs."""
        return self._lane.end(_BACKWARD, used, extra=order)

    def fail(self, error: BaseException, missing: Iterator[GradBucket]) -> None:
        """See `ReducerPass`."""
        self._lane.state.fail(error)


class _HookedResult:
    """The `AsyncResult` of one bucket. The hook gets a copy in host memory if no backend sends from its device."""

    def __init__(self, lane: Lane, hook: CommHook, bucket: GradBucket, staged: Transfer, text: str) -> None:
        bucket, self._staged = bucket.over(staged.payload), staged
        what, is_nccl = f"the communication hook {hook.name} for {bucket}", lane.machines.is_nccl(staged.payload.device)
        self._called = lane.call(_BACKWARD, what, text, partial(_call_hook, hook, bucket, staged, is_nccl))

    def wait(self) -> Tensor:
        """Returns the gradients, on the device of the sum and on the current stream."""
        grads = self._called.wait().wait()
        return self._staged.copy_result(grads) if self._staged.is_copied else grads


def _call_hook(hook: CommHook, bucket: GradBucket, staged: Transfer, is_nccl: bool) -> HookCall:
    if staged.is_copied and staged.event is not None:
        staged.event.synchronize()
    return HookCall(hook, bucket, staged.event if is_nccl else None)
