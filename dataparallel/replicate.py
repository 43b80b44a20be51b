"""One module -> one copy per device, from a plan; which modules can be replicated is ``modules.plan``'s to say.

Replicas are fresh at every call and see whatever the source is then. Their parameters are outputs of one
differentiable broadcast, so gradients are summed back into the source by its backward. Replica 0 shares the storage of
the source's parameters and buffers; other replicas on its device share the parameters and own their buffers. Running
replicas is ``parallel_apply``'s business.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dataparallel import comm
from dataparallel.autograd.bucket_nodes import broadcast_bucket
from dataparallel.comm.buckets import fill_buckets
from dataparallel.comm.copies import alias
from dataparallel.devices import DeviceLike, resolve_slots
from dataparallel.modules.build import build_replica, collector_paused
from dataparallel.modules.plan import ModulePlan
from dataparallel.profiling import in_stage
from dataparallel.streams.current import current_streams
from dataparallel.streams.gradients import GradientStreams

__all__ = ["BUCKET_CAP_MB", "cap_in_bytes", "copy_tensors", "replicate"]

M = TypeVar("M", bound=nn.Module)

BUCKET_CAP_MB = 25.0
"""Size in MiB of the buckets in which parameters travel, and their gradients back, where the caller gives none."""

FIRST_BUCKET_BYTES = 2**20
"""1 MiB: the bucket whose gradients come first."""


@in_stage("replicate")
def replicate(
    network: M, devices: Sequence[DeviceLike], detach: bool = False, *, bucket_cap_mb: float = BUCKET_CAP_MB
) -> list[M]:
    """A copy of ``network`` for each of ``devices``; its parameters and buffers should be on the first of them.

    Args:
        network: a module without uninitialised parameters, compiled modules, or Python modules below ScriptModules.
        devices: the slots; a device may be listed more than once.
        detach: copies without autograd.
        bucket_cap_mb: size in MiB of the buckets in which parameters travel, and their gradients back; above 0.

    Returns:
        The replicas, in slot order. Parameters that need gradients are outputs of nodes for each bucket; where
        gradients are not being recorded they are leaves that need them too, for a ``forward`` that turns recording on
        again.

    Raises:
        RuntimeError: the tree cannot be replicated; the message names the module.
        TypeError, ValueError: devices as in ``dataparallel.devices.resolve_slots``; ``bucket_cap_mb`` not above 0.
    """
    cap_bytes = cap_in_bytes(bucket_cap_mb)
    slots = resolve_slots(devices)
    record = torch.is_grad_enabled() and not detach
    with collector_paused():
        plan = ModulePlan.of(network)
        copies = copy_tensors(plan, slots, record, cap_bytes)
        if not record and not detach and not torch.is_inference_mode_enabled():
            _make_leaves(plan, copies)
        return [build_replica(plan, tensors, record) for tensors in copies]


def copy_tensors(plan: ModulePlan, slots: list[torch.device], record: bool, cap_bytes: int) -> list[list[Tensor]]:
    """The plan's tensors for each slot."""
    copies: list[list[Tensor]] = [list(plan.tensors) for _ in slots]
    parameters = set(plan.parameters)
    recorded: list[int] = []
    constant: list[int] = []
    buffers: list[int] = []
    for i, tensor in enumerate(plan.tensors):
        (recorded if record and tensor.requires_grad else constant if i in parameters else buffers).append(i)
    if recorded:
        sent = _broadcast_in_buckets([plan.tensors[i] for i in recorded], slots, cap_bytes)
        for slot, (on_slot, outputs) in enumerate(zip(copies, sent, strict=True)):
            for i, output in zip(recorded, outputs, strict=True):
                on_slot[i] = output.clone() if slot and i not in parameters else output
    for indices, own in ((constant, False), (buffers, True)):
        sent = comm.broadcast_coalesced([plan.tensors[i] for i in indices], slots, cap_bytes, own_storage=own)
        for slot, tensors in enumerate(sent):
            for i, tensor in zip(indices, tensors, strict=True):
                # A parameter that no graph records still is a tensor of the replica's own.
                copies[slot][i] = tensor if own else alias(tensor, slot)
    return copies


def cap_in_bytes(bucket_cap_mb: float) -> int:
    """A size in MiB as bytes, at least 1; ``ValueError`` if it is not above 0."""
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb}: a bucket holds more than 0 MiB")
    return max(1, int(min(bucket_cap_mb * 2**20, sys.maxsize)))


def _broadcast_in_buckets(tensors: list[Tensor], slots: list[torch.device], cap_bytes: int) -> list[list[Any]]:
    """The tensors on every slot, by nodes for each bucket.

    Buckets are filled from the last tensor to the first, because gradients of the last layers come first, and the first
    one is small, so that sums start early: so does DistributedDataParallel (Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", VLDB 2020). They grow step by step, because nothing is left to
    overlap with the sum of the last one, which in a model of a few MiB would else be nearly all of it.
    """
    results: list[list[Any]] = [[None] * len(tensors) for _ in slots]
    is_at_root = all(tensor.device == slots[0] for tensor in tensors)
    gradient_streams = GradientStreams.for_forward(slots, current_streams(slots)) if is_at_root else None
    last_to_first = range(len(tensors) - 1, -1, -1)
    for indices in fill_buckets(tensors, last_to_first, FIRST_BUCKET_BYTES, cap_bytes):
        bucket = [tensors[i] for i in indices]
        for result, of_slot in zip(results, broadcast_bucket(slots, bucket, gradient_streams), strict=True):
            for i, output in zip(indices, of_slot, strict=True):
                result[i] = output
    return results


def _make_leaves(plan: ModulePlan, copies: list[list[Tensor]]) -> None:
    """Copies of parameters that need gradients need them too."""
    needed = [i for i in plan.parameters if plan.tensors[i].requires_grad and not plan.tensors[i].is_inference()]
    for tensors in copies:
        for i in needed:
            tensors[i].requires_grad_()
