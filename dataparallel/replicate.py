"""One module -> one copy per device, from a plan; which modules can be replicated is ``module_plan``'s to say.

Replicas are fresh at every call and see whatever the source is then. Their parameters are outputs of one
differentiable broadcast, so gradients are summed back into the source by its backward. Replica 0 shares the storage of
the source's parameters and buffers; other replicas on its device share the parameters and own their buffers. Running
replicas is ``parallel_apply``'s business.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dataparallel import _torch, comm
from dataparallel._torch import HOOK_FLAGS, HOOK_TABLES, OWN_HOOK_TABLES, REGISTRIES
from dataparallel.bucket_nodes import broadcast_bucket
from dataparallel.buckets import fill_buckets
from dataparallel.devices import DeviceLike, resolve_slots
from dataparallel.functions import alias
from dataparallel.module_plan import MADE, NOTHING, STANDS_FOR, ModuleEntry, ModulePlan, dotted
from dataparallel.module_references import Rebinding
from dataparallel.replica_cycles import note_circles
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.side_streams import beside_backward
from dataparallel.streams import current_streams

__all__ = [
    "BUCKET_CAP_MB",
    "bare_module",
    "build_replica",
    "cap_in_bytes",
    "collector_paused",
    "copy_tensors",
    "hook_flags",
    "make_parameters",
    "own_attributes",
    "replicate",
]

M = TypeVar("M", bound=nn.Module)

BUCKET_CAP_MB = 25.0
"""Size in MiB of the buckets in which parameters travel, and their gradients back, where the caller gives none."""

FIRST_BUCKET_BYTES = 2**20
"""1 MiB: the bucket whose gradients come first."""


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


@contextmanager
def collector_paused() -> Iterator[None]:
    """While replicas are made the garbage collector waits.

    They are thousands of objects, all of them in use, through which it would walk again and again in vain. It is a
    switch of the whole process: other threads' garbage waits for these milliseconds too. Where it is off it stays off.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


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
    beside = beside_backward(slots, current_streams(slots)) if is_at_root else None
    last_to_first = range(len(tensors) - 1, -1, -1)
    for indices in fill_buckets(tensors, last_to_first, FIRST_BUCKET_BYTES, cap_bytes):
        bucket = [tensors[i] for i in indices]
        for result, of_slot in zip(results, broadcast_bucket(slots, bucket, beside), strict=True):
            for i, output in zip(indices, of_slot, strict=True):
                result[i] = output
    return results


def _make_leaves(plan: ModulePlan, copies: list[list[Tensor]]) -> None:
    """Copies of parameters that need gradients need them too."""
    needed = [i for i in plan.parameters if plan.tensors[i].requires_grad and not plan.tensors[i].is_inference()]
    for tensors in copies:
        for i in needed:
            tensors[i].requires_grad_()


def build_replica(plan: ModulePlan, tensors: list[Tensor], record: bool) -> Any:
    """One replica of the plan's tree around ``tensors``, which become its parameters and buffers."""
    make_parameters(plan, tensors, ReplicaParameter if record else nn.Parameter)
    held = [*tensors, *plan.as_they_are, None]  # None at `NOTHING`
    flags = hook_flags()
    modules = [_by_its_own_rule(entry) if entry.has_own_rule else bare_module(entry.cls) for entry in plan.entries]
    placed = [*modules, *plan.as_they_are, None]
    for entry, module in zip(plan.entries, modules, strict=True):
        if entry.is_script:
            _fill_script(entry, module, placed, held)
        else:
            own = own_attributes(entry, vars(module) if entry.has_own_rule else entry.attributes.copy(), flags)
            _fill_registries(entry, own, placed, held)
            # Past `Module.__setattr__`, which would look for parameters in it.
            object.__setattr__(module, "__dict__", own)
            for name in entry.slots:
                if hasattr(entry.module, name):
                    setattr(module, name, getattr(entry.module, name))
    if plan.has_references:
        _point_attributes(plan, modules, tensors)
    return modules[0]


def make_parameters(plan: ModulePlan, tensors: list[Tensor], cls: type[Tensor]) -> None:
    """Makes copies of plain parameters instances of ``cls``."""
    for i in plan.parameters:
        if type(tensors[i]) is Tensor:
            # The object stays what the broadcast returned, graph included; only its Python class changes.
            tensors[i].__class__ = cls


def _point_attributes(plan: ModulePlan, modules: list[nn.Module], tensors: list[Tensor]) -> None:
    """Points what attributes outside of the registries hold at the replica."""
    table: dict[int, Any] = {id(entry.module): module for entry, module in zip(plan.entries, modules, strict=True)}
    table[plan.source] = modules[0]
    table.update({id(source): tensor for source, tensor in zip(plan.tensors, tensors, strict=True)})
    rebinding = Rebinding(table)
    for entry, module in zip(plan.entries, modules, strict=True):
        attributes = vars(module)
        for key in entry.references:
            if key in attributes:
                try:
                    attributes[key] = rebinding.rebound(attributes[key])
                except Exception as error:
                    raise RuntimeError(
                        f"cannot replicate {dotted(entry.name, key)!r}: it refers to modules of the tree, and another "
                        f"{type(attributes[key]).__name__} that refers to their replicas could not be built"
                    ) from error
    if plan.may_hold_cycles:
        note_circles(modules[0], rebinding.made)


def bare_module(cls: type[nn.Module]) -> nn.Module:
    """An instance without any attribute."""
    try:
        return object.__new__(cls)  # a class's own may want arguments
    except TypeError:  # a class that is also a built-in type
        return cls.__new__(cls)


def _by_its_own_rule(entry: ModuleEntry) -> nn.Module:
    """What the class's ``_replicate_for_data_parallel`` makes of the source."""
    replica: nn.Module = entry.module._replicate_for_data_parallel()
    own = vars(replica)
    # What its rule leaves out comes along, but for methods of a ScriptModule, which are bound to the source.
    left_out = entry.attributes.keys() - own.keys()
    own.update(
        {key: entry.attributes[key] for key in left_out if not isinstance(entry.attributes[key], _torch.ScriptMethod)}
    )
    own.pop(MADE, None)
    return replica


def hook_flags() -> dict[str, Any]:
    """Empty tables for the replicas of one call: what they note of hooks by their numbers."""
    return {name: OrderedDict() for name in HOOK_FLAGS}


def own_attributes(entry: ModuleEntry, own: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """``own``, a copy of the source's attributes, with empty registries and with tables for hooks that are its own.

    ``flags`` are those tables that replicas may share, see `hook_flags`.
    """
    attributes = entry.attributes
    own["_is_replica"] = True
    own.pop(STANDS_FOR, None)
    for name in REGISTRIES:
        own[name] = {}
    own["_non_persistent_buffers_set"] = attributes["_non_persistent_buffers_set"].copy()
    if entry.has_hooks:
        for name in HOOK_TABLES:
            own[name] = attributes[name].copy()
    else:
        for name in OWN_HOOK_TABLES:
            own[name] = OrderedDict()
        own.update(flags)
    return own


def _fill_registries(entry: ModuleEntry, own: dict[str, Any], modules: list[Any], held: list[Any]) -> None:
    """Puts tensors and children of the replica where the source has its own. Both lists end with ``None``."""
    if entry.parameters:
        registry = own["_parameters"]
        for key, i in entry.parameters.items():
            registry[key] = held[i]
    if entry.buffers:
        registry = own["_buffers"]
        for key, i in entry.buffers.items():
            registry[key] = held[i]
    if entry.children:
        registry = own["_modules"]
        for key, i in entry.children.items():
            registry[key] = modules[i]
        for key in entry.proxied:
            registry[key] = weakref.proxy(registry[key])


def _fill_script(entry: ModuleEntry, replica: nn.Module, modules: list[Any], held: list[Any]) -> None:
    """The registries of a ScriptModule are views of a C++ object, which is written through attributes."""
    for key, i in (*entry.parameters.items(), *entry.buffers.items()):
        if i != NOTHING:
            setattr(replica, key, held[i])
    for key, i in entry.children.items():
        replica._modules[key] = modules[i]
