"""What `replace_torch` puts in the place of torch's names: the library, with torch's rule where it promises more.

Where torch accepts what the library refuses, these accept it too, and `fall_back` says so once. They count their calls.
Only ``replacement`` and programs that run under it use them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm as torch_comm

from dataparallel import _torch, comm
from dataparallel.batches import gather as gathers
from dataparallel.batches import scatter as scatters
from dataparallel.batches.structures import Arguments
from dataparallel.call import parallel_apply as applies
from dataparallel.comm.buckets import DEFAULT_CAP_BYTES
from dataparallel.devices import CPU, DeviceLike, current_device, resolve_slots
from dataparallel.forms import data_parallel as wrappers
from dataparallel.integrations import torch_rules
from dataparallel.integrations.torch_rules import as_torch_splits, fall_back
from dataparallel.integrations.torch_wrapper import DataParallel, Once
from dataparallel.replicas import replicate as replicates

F = TypeVar("F", bound=Callable[..., Any])

_CAP_BYTES = replicates.cap_in_bytes(replicates.BUCKET_CAP_MB)


def _counted(name: str) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            torch_rules.counts.note_call(name)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


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
    """`dataparallel.data_parallel`, with `as_torch_splits`."""
    slots = resolve_slots(device_ids)
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    inputs, module_kwargs = as_torch_splits(Arguments((inputs, module_kwargs)), dim, len(slots))
    return wrappers.call_once(Once, module, inputs, slots, output_device, dim, module_kwargs)


@_counted("replicate")
def replicate(network: nn.Module, devices: Sequence[DeviceLike], detach: bool = False) -> list[Any]:
    """`dataparallel.replicate`, with gradients as in `DataParallel`. ``detach``: the first has the source's tensors."""
    return replicates.make_replicas(network, resolve_slots(devices), _CAP_BYTES, detach, as_torch=True)


@_counted("scatter")
def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0) -> Sequence[Any]:
    """`dataparallel.scatter`, with `as_torch_splits`. The chunks of a tensor are a tuple."""
    chunks = scatters.scatter(as_torch_splits(inputs, dim, len(target_gpus)), target_gpus, dim)
    return tuple(chunks) if isinstance(inputs, Tensor) else chunks


@_counted("scatter_kwargs")
def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, target_gpus: Sequence[DeviceLike], dim: int = 0
) -> Any:
    """`dataparallel.scatter_kwargs`, with `as_torch_splits`."""
    inputs, kwargs = as_torch_splits(Arguments((inputs, kwargs)), dim, len(target_gpus))
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
) -> list[Tensor]:
    """`dataparallel.comm.broadcast`, of complex tensors as real ones. The copies are a list."""
    return [*comm.broadcast(_real(tensor), devices, out=out)]


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
