"""What `replace_torch` puts in the place of torch's names: the library, with torch's rule where it promises more.

Where torch accepts what the library refuses, these accept it too, and `fall_back` says so once. They count their calls.
Only ``replacement`` and programs that run under it use them.
"""

from __future__ import annotations

import functools
import threading
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm as torch_comm

from dataparallel import _torch, comm
from dataparallel.batches import gather as gathers
from dataparallel.batches import scatter as scatters
from dataparallel.batches.batch_types import PerReplica
from dataparallel.batches.structures import is_whole, leaves, with_leaves
from dataparallel.call import parallel_apply as applies
from dataparallel.comm.buckets import DEFAULT_CAP_BYTES
from dataparallel.comm.checks import near_equal_sizes
from dataparallel.devices import CPU, DeviceLike, current_device, resolve_slots
from dataparallel.forms import data_parallel as wrappers
from dataparallel.forms.signatures import shows_forward_of_module
from dataparallel.replicas import replicate as replicates
from dataparallel.user_warnings import warn_user

F = TypeVar("F", bound=Callable[..., Any])

TorchDataParallel = nn.DataParallel
"""torch's own class. `replace_torch` changes the name ``torch.nn.DataParallel``, not this one."""


# ---- what is counted, and what falls back ----------------------------------------------------------------------------


class Counts:
    """How often each name was called, and what has fallen back to torch's rule. Threads may call at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()

    def note_call(self, name: str) -> None:
        """Counts a call."""
        with self._lock:
            self._calls[name] += 1

    def note_fallback(self, rule: str) -> bool:
        """Counts a call that follows a rule of torch. Returns true the first time."""
        with self._lock:
            self._fallbacks[rule] += 1
            return self._fallbacks[rule] == 1

    def calls(self) -> dict[str, int]:
        """Returns how often each name was called."""
        with self._lock:
            return dict(self._calls)

    def fallbacks(self) -> dict[str, int]:
        """Returns how often each rule of torch was followed."""
        with self._lock:
            return dict(self._fallbacks)


counts = Counts()
"""Of this process."""


def fall_back(rule: str, reason: str) -> None:
    """Counts a call that follows a rule of torch, and warns of the first one with the reason."""
    if counts.note_fallback(rule):
        warn_user(f"as torch.nn.DataParallel does, {rule}: {reason}")


def _counted(name: str) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts.note_call(name)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


# ---- batches whose sizes differ --------------------------------------------------------------------------------------


def split_where_sizes_differ(arguments: Any, dim: int, slots: int) -> Any:
    """Splits each tensor by itself where batch sizes differ, as torch does. All have chunks for the replicas that run.

    torch drops the chunks that are left. A warning says so, unless they are entries of a tensor that has one equal
    entry for each slot: ``Trainer`` of transformers passes a count in that way, and its last batch may be small.

    Args:
        arguments: any structure. It is returned as it is if ``slots`` is 0, or if batch sizes agree.
    """
    if not slots:
        return arguments
    found = [
        leaf
        for _, leaf in leaves(arguments, "")
        if isinstance(leaf, Tensor) and not is_whole(leaf) and -leaf.dim() <= dim < leaf.dim()
    ]
    sizes = [leaf.shape[dim] for leaf in found]
    if len({*sizes}) < 2:
        return arguments
    # An empty tensor is an empty chunk for each slot.
    chunks = [leaf.split(near_equal_sizes(leaf.shape[dim], slots) if leaf.shape[dim] else 0, dim) for leaf in found]
    chunks = [parts if size else parts * slots for parts, size in zip(chunks, sizes, strict=True)]
    replicas = min(map(len, chunks))
    dropped = [leaf for leaf, parts in zip(found, chunks, strict=True) if len(parts) > replicas]
    different = f"batch sizes differ ({', '.join(map(str, dict.fromkeys(sizes)))})"
    advice = "Mark a tensor that every replica needs with dataparallel.whole(tensor)"
    if any(not _is_one_entry_for_each_slot(leaf, dim, slots) for leaf in dropped):
        fall_back(
            "samples are dropped",
            f"{different}, and {replicas} of {slots} replicas run: one of the tensors has no more chunks. {advice}",
        )
    elif len({*sizes} - {slots}) > 1:
        fall_back("each tensor is split by itself", f"{different}. {advice}")
    else:
        counts.note_fallback("each tensor is split by itself")
    kept = next(size for size, parts in zip(sizes, chunks, strict=True) if size and len(parts) == replicas)
    parts = {
        id(leaf): PerReplica(parts[:replicas])
        for leaf, size, parts in zip(found, sizes, chunks, strict=True)
        if size != kept
    }
    return with_leaves(arguments, lambda leaf: parts.get(id(leaf), leaf))


def _is_one_entry_for_each_slot(tensor: Tensor, dim: int, slots: int) -> bool:
    """True if the entries are equal too, so that no value is lost with some of them."""
    return tensor.shape[dim] == slots and bool((tensor == tensor.narrow(dim, 0, 1)).all())


# ---- the class -------------------------------------------------------------------------------------------------------


class _IsAnyWrapper(ABCMeta):
    """``isinstance(model, torch.nn.DataParallel)`` is true of torch's own wrappers and of the library's too.

    It is an ``ABCMeta`` because subclasses may have abstract classes as other bases.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, TorchDataParallel) if cls is DataParallel else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, TorchDataParallel) if cls is DataParallel else super().__subclasscheck__(subclass)


WITHOUT_SLOTS = "DataParallel (no slots)"
"""Counts wrappers that run the model as it is, because there is no accelerator and the program names no slots."""

_CAP_BYTES = replicates.cap_in_bytes(replicates.BUCKET_CAP_MB)
_forward = wrappers.DataParallel.forward  # looked up here: the compiler cannot trace the lookup


class DataParallel(wrappers.DataParallel[Any], metaclass=_IsAnyWrapper):
    """`dataparallel.DataParallel` in the place of ``torch.nn.DataParallel``.

    Hooks stay functions of the source, as in torch: a library may find what they saved by the module in their closure.
    The gradient of a parameter that no replica used is zeros, as in torch, if another one has a gradient.

    A class that was derived from torch's before calls this one's methods by the name, on its own instances. They are
    torch's.
    """

    _as_torch = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, wrappers.DataParallel):
            TorchDataParallel.__init__(self, *args, **kwargs)
            return
        super().__init__(*args, **kwargs)
        counts.note_call("DataParallel" if self.device_ids else WITHOUT_SLOTS)

    @shows_forward_of_module
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As `dataparallel.DataParallel.forward`, with `split_where_sizes_differ`, unless a subclass splits inputs."""
        if not isinstance(self, wrappers.DataParallel):
            return TorchDataParallel.forward(self, *inputs, **kwargs)
        if not torch.compiler.is_dynamo_compiling():  # without devices the compiler traces this, and knows no locks
            counts.note_call("DataParallel.forward")
        if wrappers.is_own_stage(self.scatter):
            inputs, kwargs = split_where_sizes_differ((inputs, kwargs), self.dim, len(self.device_ids))
        return _forward(self, *inputs, **kwargs)

    @wrappers.own_stage
    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]) -> Any:
        """As `dataparallel.DataParallel.scatter`, with `split_where_sizes_differ`."""
        inputs, kwargs = split_where_sizes_differ((inputs, kwargs), self.dim, len(device_ids))
        return wrappers.DataParallel.scatter(self, inputs, kwargs, device_ids)


# ---- the functions ---------------------------------------------------------------------------------------------------


class _Once(wrappers.DataParallel[Any]):
    """The wrapper of a call of `data_parallel`, with gradients as in `DataParallel`."""

    _as_torch = True


@_counted("data_parallel")
@_torch.not_traced
def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """`dataparallel.data_parallel`, with `split_where_sizes_differ`."""
    slots = resolve_slots(device_ids)
    inputs, module_kwargs = split_where_sizes_differ((inputs, module_kwargs), dim, len(slots))
    return wrappers.call_once(_Once, module, inputs, device_ids, output_device, dim, module_kwargs)


@_counted("replicate")
def replicate(network: nn.Module, devices: Sequence[DeviceLike], detach: bool = False) -> list[Any]:
    """`dataparallel.replicate`, with gradients as in `DataParallel`. ``detach``: the first has the source's tensors."""
    return replicates.make_replicas(network, resolve_slots(devices), _CAP_BYTES, detach, as_torch=True)


@_counted("scatter")
def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0) -> list[Any]:
    """`dataparallel.scatter`, with `split_where_sizes_differ`."""
    return scatters.scatter(split_where_sizes_differ(inputs, dim, len(target_gpus)), target_gpus, dim)


@_counted("scatter_kwargs")
def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, target_gpus: Sequence[DeviceLike], dim: int = 0
) -> Any:
    """`dataparallel.scatter_kwargs`, with `split_where_sizes_differ`."""
    inputs, kwargs = split_where_sizes_differ((inputs, kwargs), dim, len(target_gpus))
    return scatters.scatter_kwargs(inputs, kwargs, target_gpus, dim)


# ---- the functions of torch.nn.parallel.comm ------------------------------------------------------------------------
#
# A complex tensor becomes a real one with a last dimension of 2. torch's own autograd functions call these functions
# too, and make the results complex again.


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _destination(inputs: Sequence[Tensor], destination: DeviceLike | None) -> DeviceLike | None:
    if destination is not None or not inputs or inputs[0].device == CPU:
        return destination
    return current_device(inputs[0].device)


@_counted("comm.broadcast")
def comm_broadcast(
    tensor: Tensor, devices: Sequence[DeviceLike] | None = None, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """`dataparallel.comm.broadcast`, of complex tensors as real ones."""
    return comm.broadcast(_real(tensor), devices, out=out)


@_counted("comm.broadcast_coalesced")
def comm_broadcast_coalesced(
    tensors: Iterable[Tensor], devices: Sequence[DeviceLike], buffer_size: int = DEFAULT_CAP_BYTES
) -> list[list[Tensor]]:
    """`dataparallel.comm.broadcast_coalesced`, of complex tensors as real ones."""
    return comm.broadcast_coalesced([_real(tensor) for tensor in tensors], devices, buffer_size)


@_counted("comm.reduce_add")
def comm_reduce_add(inputs: Iterable[Tensor], destination: DeviceLike | None = None) -> Tensor:
    """`dataparallel.comm.reduce_add`, by default on the current device."""
    inputs = list(inputs)
    return comm.reduce_add(inputs, _destination(inputs, destination))


@_counted("comm.reduce_add_coalesced")
def comm_reduce_add_coalesced(
    inputs: Iterable[Sequence[Tensor]], destination: DeviceLike | None = None, buffer_size: int = DEFAULT_CAP_BYTES
) -> tuple[Tensor, ...]:
    """`dataparallel.comm.reduce_add_coalesced`, by default on the current device."""
    inputs = list(inputs)
    return comm.reduce_add_coalesced(inputs, _destination(inputs[0] if inputs else [], destination), buffer_size)


@_counted("comm.scatter")
def comm_scatter(
    tensor: Tensor,
    devices: Sequence[DeviceLike] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> Any:
    """`dataparallel.comm.scatter`, of complex tensors as real ones. With ``streams`` it is torch's own function."""
    if streams is not None:
        fall_back(
            "comm.scatter copies on the caller's streams", "streams= was passed, so torch's own function is called"
        )
        return _torch_scatter(tensor, devices, chunk_sizes, dim, streams, out=out)
    return comm.scatter(_real(tensor), devices, chunk_sizes, dim, out=out)


@_counted("comm.gather")
def comm_gather(
    tensors: Iterable[Tensor], dim: int = 0, destination: DeviceLike | None = None, *, out: Tensor | None = None
) -> Tensor:
    """`dataparallel.comm.gather`, of complex tensors as real ones, by default on the current device."""
    tensors = [_real(tensor) for tensor in tensors]
    return comm.gather(tensors, dim, _destination(tensors, destination) if out is None else destination, out=out)


_torch_scatter = torch_comm.scatter

NAMES: dict[str, dict[str, Any]] = {
    "torch.nn.parallel.data_parallel": {"DataParallel": DataParallel, "data_parallel": data_parallel},
    "torch.nn.parallel.replicate": {"replicate": replicate},
    "torch.nn.parallel.parallel_apply": {"parallel_apply": _counted("parallel_apply")(applies.parallel_apply)},
    "torch.nn.parallel.scatter_gather": {
        "scatter": scatter,
        "scatter_kwargs": scatter_kwargs,
        "gather": _counted("gather")(gathers.gather),
    },
    "torch.nn.parallel.comm": {
        "broadcast": comm_broadcast,
        "broadcast_coalesced": comm_broadcast_coalesced,
        "reduce_add": comm_reduce_add,
        "reduce_add_coalesced": comm_reduce_add_coalesced,
        "scatter": comm_scatter,
        "gather": comm_gather,
    },
}
"""What replaces torch's names, by the module of torch that defines them."""
