"""`replicate`: copies one module to each slot, from the source as it is then."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dataparallel import _torch, comm
from dataparallel.arguments import checked
from dataparallel.autograd.bucket_gradients import GradientStreams, broadcast_bucket
from dataparallel.comm.buckets import fill_buckets
from dataparallel.comm.kinds import alias
from dataparallel.comm.streams.arrivals import Arrivals, ExpectedArrivals, arrivals_for
from dataparallel.comm.streams.current import current_streams
from dataparallel.comm.transport import FlatBroadcast, Later
from dataparallel.devices import DeviceLike, resolve_slots
from dataparallel.replicas.build import build_replica, collector_paused
from dataparallel.replicas.compiled.calls import Compiled
from dataparallel.replicas.plan import ModulePlan, refuse_constants

M = TypeVar("M", bound=nn.Module)

BUCKET_CAP_MB = 25.0
"""Default size in MiB of the buckets in which parameters are sent and gradients are sent back."""

FIRST_BUCKET_BYTES = 2**20
"""1 MiB: the size of the bucket whose gradients come first."""


@_torch.not_traced
def replicate(
    network: M, devices: Sequence[DeviceLike], detach: bool = False, *, bucket_cap_mb: float = BUCKET_CAP_MB
) -> list[M]:
    """A copy of ``network`` for each of ``devices``. Its parameters and buffers should be on the first device.

    Args:
        network: a module without uninitialised parameters and without Python modules below ScriptModules.
        devices: the slots; a device may be listed more than once.
        detach: make copies without autograd.
        bucket_cap_mb: size in MiB of the buckets in which parameters are sent and gradients are sent back; above 0.

    Returns:
        The replicas, in slot order. Parameters that require gradients are outputs of one autograd node per bucket,
        whose backward sums gradients into the source. If no graph is recorded they are leaves that require gradients,
        for a ``forward`` that enables recording. Replica 0 shares the storage of the source's parameters and buffers.
        Other replicas on its device share the parameters and have their own buffers.

    Raises:
        RuntimeError: the tree cannot be replicated; the message names the module.
        TypeError, ValueError: devices as in ``dataparallel.devices.resolve_slots``; ``bucket_cap_mb`` is not above 0;
            a parameter is not initialised yet.
    """
    detach = checked("detach", detach, bool)
    return make_replicas(network, resolve_slots(None, devices), cap_in_bytes(bucket_cap_mb), detach)


def make_replicas(
    network: Any,
    slots: list[torch.device],
    cap_bytes: int,
    detach: bool = False,
    root_call: Compiled | None = None,
) -> list[Any]:
    """`replicate`, for wrappers. ``root_call``: see `ModulePlan.of`."""
    record = torch.is_grad_enabled() and not detach
    with collector_paused():
        plan = ModulePlan.of(network, root_call)
        plan.cycles = None  # only the caller knows how long the replicas are needed
        refuse_constants(plan, slots)
        is_at_root = all(tensor.device == slots[0] for tensor in plan.tensors)
        copies = Copies(plan, slots, cap_bytes, record, arrivals_for(slots, plan.tensors) if is_at_root else None)
        copies.send()
        if not record and not detach and not torch.is_inference_mode_enabled():
            copies.make_leaves()
        return copies.build_replicas()


class Copies:
    """The tensors of a plan for each slot of one call.

    Attributes:
        by_slot: for each slot a list of tensors. At first they are the source's.
        record: a graph is recorded: tensors that require gradients are outputs of a broadcast.
        arrivals: parameters may still be on their way when they are used; ``None`` if they may not.
        expected: for each replica that was built here, what it waits for; ``None`` if nothing is late.
    """

    def __init__(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.plan, self.slots, self.cap_bytes = plan, slots, cap_bytes
        self.record, self.arrivals = record, arrivals
        self.by_slot: list[list[Tensor]] = [list(plan.tensors) for _ in slots]
        self.late: list[FlatBroadcast] = []
        self.expected: list[ExpectedArrivals | None] = []

    def send(self) -> None:
        """Makes all copies."""
        tensors, parameters = self.plan.tensors, set(self.plan.parameters)
        recorded = [i for i, tensor in enumerate(tensors) if self.record and tensor.requires_grad]
        sent = {*recorded}
        if recorded:
            hold = None if self.plan.cycles is None else self.plan.cycles.hold("backward")
            self._send_in_buckets(recorded, hold)
        self.send_constants([i for i in range(len(tensors)) if i in parameters and i not in sent])
        self.send_buffers([i for i in range(len(tensors)) if i not in parameters and i not in sent])
        cloned = [i for i in recorded if i not in parameters]
        if self.arrivals is not None:
            # Modules are used in about the order in which they are registered.
            late = sorted(self.late, key=lambda broadcast: min(broadcast.indices))
            self.late = []
            self.arrivals.launch(late, self.plan.read_directly.union(cloned))
        for on_slot in self.by_slot[1:]:
            for i in cloned:
                on_slot[i] = Tensor.clone(on_slot[i])

    def send_constants(self, indices: Sequence[int]) -> None:
        """Makes copies of parameters that no graph records, at ``indices`` of the plan."""
        sources = [self.plan.tensors[i] for i in indices]
        sent = comm.broadcast_coalesced(sources, self.slots, self.cap_bytes, later=self.later(indices))
        # Each replica has a tensor object of its own for a parameter, even if no graph records it. But all slots on one
        # device receive the same object, which is the source's on its device.
        for slot, (on_slot, received) in enumerate(zip(self.by_slot, sent, strict=True)):
            is_first = self.slots.index(self.slots[slot]) == slot
            for i, tensor in zip(indices, received, strict=True):
                is_new = is_first and tensor is not self.plan.tensors[i]
                on_slot[i] = tensor if is_new else alias(tensor, slot)

    def send_buffers(self, indices: Sequence[int]) -> None:
        """Makes copies of buffers. Slot 0 has the source's memory, every other slot its own."""
        sources = [self.plan.tensors[i] for i in indices]
        self.put(indices, comm.broadcast_coalesced(sources, self.slots, self.cap_bytes, own_storage=True))

    def put(self, indices: Sequence[int], by_slot: Sequence[Sequence[Any]]) -> None:
        for on_slot, tensors in zip(self.by_slot, by_slot, strict=True):
            for i, tensor in zip(indices, tensors, strict=True):
                on_slot[i] = tensor

    def later(self, positions: Sequence[int]) -> Later | None:
        """Notes broadcasts of tensors at these positions that are launched later; ``None`` if none may be late."""
        if self.arrivals is None:
            return None
        return lambda late: self.late.append(late._replace(indices=[positions[k] for k in late.indices]))

    # Tensors made in inference mode could not be used outside of it, as replicas inside ``frozen`` may be.
    @torch.inference_mode(False)
    @torch.no_grad()
    def send_leaves(self) -> None:
        self.send()
        self.make_leaves()

    def make_leaves(self) -> None:
        tensors = self.plan.tensors
        needed = [i for i in self.plan.parameters if tensors[i].requires_grad and not tensors[i].is_inference()]
        for on_slot in self.by_slot:
            for i in needed:
                Tensor.requires_grad_(on_slot[i])

    def build_replicas(self) -> list[Any]:
        self.expected = [None if self.arrivals is None else ExpectedArrivals() for _ in self.slots]
        self.expect(self.expected)
        pairs = zip(self.by_slot, self.expected, strict=True)
        return [build_replica(self.plan, tensors, self.record, expected) for tensors, expected in pairs]

    def expect(self, expected: Sequence[ExpectedArrivals | None]) -> None:
        """Tells replicas of the plan, by their ``expected``, what is on its way to them in this call."""
        for slot, each in zip(range(len(self.slots)), expected, strict=False):
            if self.arrivals is not None and each is not None:
                self.arrivals.expect(each, slot, len(self.plan.tensors) + len(self.plan.shared) + 1)

    def _send_in_buckets(self, recorded: Sequence[int], held: object) -> None:
        """Makes copies of the tensors at the positions ``recorded``, as outputs of one autograd node per bucket.

        ``held``: see `broadcast_bucket`.

        Buckets are filled from the last tensor to the first, because gradients of the last layers come first. The first
        bucket is small, so that sums start early. DistributedDataParallel does the same (Li et al., "PyTorch
        Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020). Here buckets grow step by step and
        shrink again at the end, because no computation is left to overlap with the sum of the last one, and a forward
        waits for the parameters in it.
        """
        slots, tensors = self.slots, self.plan.tensors
        is_at_root = all(tensors[i].device == slots[0] for i in recorded)
        gradient_streams = GradientStreams.for_forward(slots, current_streams(slots)) if is_at_root else None
        buckets = fill_buckets(tensors, recorded[::-1], FIRST_BUCKET_BYTES, self.cap_bytes)
        for number, indices in enumerate(buckets):
            streams = None if gradient_streams is None else gradient_streams.for_bucket(number)
            bucket = [tensors[i] for i in indices]
            self.put(indices, broadcast_bucket(slots, bucket, streams, later=self.later(indices), held=held))


def cap_in_bytes(bucket_cap_mb: float) -> int:
    """Converts an argument from MiB to bytes, at least 1. Raises as `checked`."""
    return max(1, int(min(checked("bucket_cap_mb", bucket_cap_mb, float, above=0) * 2**20, sys.maxsize)))
