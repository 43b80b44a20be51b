"""`replace_torch` puts the library in the place of ``torch.nn.DataParallel`` and its relatives, and takes it back.

It changes names only: of torch's modules, and of all other modules that have imported them by name. Objects that exist
stay what they are.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.batches import gather as gathers
from dataparallel.batches import scatter as scatters
from dataparallel.batches.structures import Arguments
from dataparallel.call import parallel_apply as applies
from dataparallel.devices import DeviceLike, resolve_slots
from dataparallel.forms import data_parallel as wrappers
from dataparallel.integrations import replacement, torch_wrapper
from dataparallel.integrations.torch_wrapper import DataParallel, Once, as_torch_splits
from dataparallel.replicas import replicate as replicates

F = TypeVar("F", bound=Callable[..., Any])

_CAP_BYTES = replicates.cap_in_bytes(replicates.BUCKET_CAP_MB)


def _counted(name: str) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            torch_wrapper.counts.note_call(name)
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


NAMES: dict[str, dict[str, Any]] = {
    "torch.nn.parallel.data_parallel": {"DataParallel": DataParallel, "data_parallel": data_parallel},
    "torch.nn.parallel.replicate": {"replicate": replicate},
    "torch.nn.parallel.parallel_apply": {"parallel_apply": _counted("parallel_apply")(applies.parallel_apply)},
    "torch.nn.parallel.scatter_gather": {
        "scatter": scatter,
        "scatter_kwargs": scatter_kwargs,
        "gather": _counted("gather")(gathers.gather),
    },
}
"""What replaces torch's names, by the module of torch that defines them."""


_lock = threading.Lock()  # guards `_active`, and the names while they change
_active: list[Replacement] = []

_LEFT_ALONE = ("torch.nn.parallel.", "dataparallel.")
"""Prefixes of modules in which no other names are replaced than `replacement.NAMES` has for them.

So torch's own functions go on calling one another.
"""


class Replacement:
    """What `replace_torch` returns: `undo` it, or use it as a context manager. Blocks may be nested.

    Attributes:
        places: where names were replaced, as ``"module.name"``.
    """

    def __init__(self) -> None:
        self.places: list[str] = []

    def undo(self) -> None:
        """Gives all names back to torch once every replacement has been undone. A second call does nothing."""
        with _lock:
            if self in _active:
                _active.remove(self)
                if not _active:
                    _swap({id(ours): theirs for theirs, ours in _PAIRS})

    def report(self) -> str:
        """Returns a text: what was replaced, how often it was called, and what has fallen back to torch's rules."""
        elsewhere = [place for place in self.places if not place.startswith("torch.")]
        lines = [f"dataparallel was in the place of {len(self.places) - len(elsewhere)} names of torch"]
        if elsewhere:
            lines.append(f"and of what was imported from there before: {', '.join(elsewhere)}")
        counts = torch_wrapper.counts
        lines += [f"  {name:24} called {number} times" for name, number in [*counts.calls.items()]]
        if not counts.calls:
            lines.append("  nothing was called")
        lines += [f"  {number} times as torch does: {rule}" for rule, number in [*counts.fallbacks.items()]]
        return "\n".join(lines)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def replace_torch() -> Replacement:
    """Has code that was written for ``torch.nn.DataParallel`` use this library, without changing it.

    ``torch.nn.DataParallel``, ``torch.nn.parallel.{DataParallel, data_parallel, replicate, scatter, gather,
    parallel_apply}``, and names that other modules have imported from there become this library's. The functions of
    ``torch.nn.parallel.comm`` stay torch's. Modules that are imported later get the names from torch. Models that are
    wrapped already stay as they are. ``isinstance(model, torch.nn.DataParallel)`` is true of wrappers of both.

    Where torch accepts what this library refuses, torch's rule is followed, with one warning. So tensors of a call may
    have different batch sizes: as many replicas run as the tensor with the fewest chunks has.

    Only names of modules are replaced. Classes that were derived from torch's class before stay as they are, and so do
    default arguments and local variables.

    Returns:
        A handle: ``replace_torch().undo()``, or ``with replace_torch():``.
    """
    replacement = Replacement()
    with _lock:
        replacement.places = _active[0].places if _active else _swap({id(theirs): ours for theirs, ours in _PAIRS})
        _active.append(replacement)
    return replacement


_PAIRS = [
    (getattr(importlib.import_module(module), name), ours)
    for module, names in replacement.NAMES.items()
    for name, ours in names.items()
]
"""torch's objects, and what replaces each."""


def _swap(replaced_by: dict[int, Any]) -> list[str]:
    """Replaces objects, which are given by their ids, in all modules, and returns where."""
    swapped = []
    for module_name, module in [*sys.modules.items()]:
        if not isinstance(module, ModuleType):
            continue
        only = replacement.NAMES.get(module_name)
        if only is None and module_name.startswith(_LEFT_ALONE):
            continue
        for name, value in [*vars(module).items()]:
            new = replaced_by.get(id(value))
            if new is not None and (only is None or name in only):
                setattr(module, name, new)
                swapped.append(f"{module_name}.{name}")
    return sorted(swapped)
