"""`MachineSums` reduces gradients over machines; `Agreement` prepares a forward on all machines.

A forward without grad mode sends nothing to other machines, so one machine may evaluate alone. `replicate` imports this
file only if a group or a mesh was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from torch import Tensor

from dataparallel.comm import nccl
from dataparallel.gradients.comm_hooks import CommHook, GradBucket, HookCall
from dataparallel.gradients.ordered_pass import AsyncResult
from dataparallel.machines.collectives import all_reduce, stage
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.group import Machines
from dataparallel.machines.rounds import PendingResult, Round
from dataparallel.machines.start import send_values


class MachineSums:
    """A `Reducer` over all machines: it sums buckets, and divides by their number if ``average``, or calls ``hook``.

    The issuing thread calls the hook, in the order of buckets that all machines have agreed on, beside the backward. If
    the hook fails on one rank, no rank gets gradients.
    """

    def __init__(self, machines: Machines, average: bool, hook: CommHook | None = None) -> None:
        self.machines, self.average, self.hook = machines, average, hook

    def begin_pass(self, contents: str) -> _MachinePass:
        """See `Reducer`. Each pass is a round of all machines. Ranks compare the hook's name too."""
        if self.hook is not None:
            contents += f"\nthe communication hook {self.hook.name}"
        return _MachinePass(self, self.machines.queue.begin_round("backward", contents))

    def signal_failure(self, error: BaseException) -> None:
        """See `Reducer`. All machines know of a `MachinesError` already."""
        if not isinstance(error, MachinesError):
            self.machines.queue.signal_failure(error)


class _MachinePass:
    """The `ReducerPass` of `MachineSums`. `launch` does not call a hook yet, so ``wait`` raises its errors."""

    def __init__(self, sums: MachineSums, round: Round) -> None:
        self.machines, self.round, self._average, self._hook = sums.machines, round, sums.average, sums.hook
        self.end_result: PendingResult | None = None

    def launch(self, bucket: GradBucket) -> AsyncResult:
        if self._hook is not None:
            return _HookedResult(self, self._hook, bucket)
        if self._average:
            bucket.summed.div_(self.machines.size)
        # `stage` is called here, because the current stream has made the sum.
        issue = partial(all_reduce, self.machines, stage(self.machines, bucket.summed))
        return self.round.launch(f"bucket {bucket.index()} of {bucket.count}, with {bucket.names[0]!r}", issue)

    def end_pass(self, used: Sequence[bool], error: BaseException | None = None) -> PendingResult:
        self.end_result = self.round.end(used, error)
        return self.end_result


class _HookedResult:
    """The `AsyncResult` of one bucket. The hook gets a copy in host memory if the group cannot send the bucket."""

    def __init__(self, of_pass: _MachinePass, hook: CommHook, bucket: GradBucket) -> None:
        self._pass, self._hook = of_pass, hook
        self._hook_call: HookCall | None = None
        self._staged = stage(of_pass.machines, bucket.summed)
        self._bucket = bucket.over(self._staged.payload)
        what = f"the communication hook {hook.name} for {self._bucket}"
        self._launched = of_pass.round.call(what, self._call_hook, self._check)

    def _call_hook(self) -> Any:
        staged, is_nccl = self._staged, self._pass.machines.is_nccl(self._staged.payload.device)
        if staged.is_copied and staged.event is not None:
            staged.event.synchronize()
        with nccl.launching() if is_nccl else nullcontext():
            self._hook_call = HookCall(self._hook, self._bucket, staged.event if is_nccl else None)
        return self._hook_call.future

    def _check(self) -> None:
        assert self._hook_call is not None
        self._hook_call.check()

    def wait(self) -> Tensor:
        """Returns the gradients, on the device of the sum and on the current stream."""
        try:
            self._launched.wait()
        except BaseException:
            # Wait until the launcher has ended the round: after the error the caller may send over the same group.
            if self._pass.end_result is not None:
                with suppress(Exception):
                    self._pass.end_result.wait()
            raise
        assert self._hook_call is not None
        grads = self._hook_call.wait()
        return self._staged.copy_result(grads) if self._staged.is_copied else grads


class Agreement:
    """Makes all machines begin a recorded forward with the same buffers and the same order of buckets."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines

    def send_buffers(self, named: Mapping[str, Tensor]) -> None:
        """Gives buffers the values of rank 0, as other slots get slot 0's values. Version counters stay as they are.

        So a graph that saved a buffer can still run its backward. The copies run on the current streams.
        """
        if named:
            send_values(self._machines, {name: tensor.data for name, tensor in named.items()})

    def order(self, positions: Sequence[int]) -> list[int]:
        """Returns the ``positions`` that rank 0 has given, on all machines."""
        contents = f"{len(positions)} parameters"
        of_rank_0: list[int] = self._machines.queue.all_gather_object("order of buckets", contents, [*positions])[0]
        return of_rank_0

    def signal_failure(self, error: BaseException) -> None:
        """Tells that a recorded forward has failed here, unless all machines of this group know the error already."""
        if not isinstance(error, MachinesError) or error.is_of_peers:
            self._machines.queue.signal_failure(error)
