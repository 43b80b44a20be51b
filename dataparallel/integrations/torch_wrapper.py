"""`DataParallel` in the place of torch's class, for programs that were written for that one.

It keeps what such programs do with torch's class beside calling it: they derive from it, pickle whole models, patch the
functions of its module, and wrap optimizers. Where the library promises more than torch does, torch's rules are kept
(`as_torch_splits`, `fall_back`), and `counts` counts calls.
"""

from __future__ import annotations

import copyreg
import functools
import pkgutil
import sys
import threading
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.batches.structures import (
    PLAIN_LEAVES,
    Arguments,
    ByReference,
    PerReplica,
    container_of,
    is_registered,
    is_whole,
    is_written_to,
    leaves,
    with_leaves,
)
from dataparallel.comm.checks import near_equal_sizes
from dataparallel.devices import DeviceLike
from dataparallel.forms import data_parallel as wrappers
from dataparallel.forms.data_parallel import TorchDataParallel
from dataparallel.samples import Samples
from dataparallel.user_warnings import warn_user


class FallbackCounts:
    """How often each name was called, and what has fallen back to torch's rule. Threads may call at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()

    def note_call(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1

    def note_fallback(self, rule: str) -> bool:
        """Counts a call that follows a rule of torch. Returns true the first time."""
        with self._lock:
            self.fallbacks[rule] += 1
            return self.fallbacks[rule] == 1


counts = FallbackCounts()
"""Of this process."""


def fall_back(rule: str, reason: str) -> None:
    """Counts a call that follows a rule of torch, and warns of the first one with the reason."""
    if counts.note_fallback(rule):
        warn_user(f"as torch.nn.DataParallel does, {rule}: {reason}")


def as_torch_splits(arguments: Any, dim: int, slots: int) -> Any:
    """Returns what `scatter` splits as torch does. ``arguments`` are returned as they are if ``slots`` is 0."""
    return _split_where_sizes_differ(_by_reference(arguments, ()), dim, slots) if slots else arguments


def _by_reference(obj: Any, above: tuple[int, ...]) -> Any:
    """Marks what torch does not look into: all but tensors, and lists, tuples and dicts that are not empty.

    A program finds there what ``forward`` has written. What belongs to this library is left as it is.
    """
    if type(obj) in PLAIN_LEAVES or isinstance(obj, (Tensor, Samples, PerReplica)) or is_registered(obj):
        return obj
    if is_written_to(obj) or id(obj) in above:  # refused later
        return obj
    container = container_of(obj) if isinstance(obj, (list, tuple, dict)) and obj else None
    if container is None:
        return ByReference(obj)
    old, above = [value for _, value in container.children(obj)], (*above, id(obj))
    is_call = type(obj) is Arguments  # its containers belong to no code of the program
    new = [value if is_call and not value else _by_reference(value, above) for value in old]
    return obj if all(map(is_, new, old)) else container.rebuild(obj, new)


def _split_where_sizes_differ(arguments: Any, dim: int, slots: int) -> Any:
    """Splits each tensor by itself where batch sizes differ, as torch does. All have chunks for the replicas that run.

    torch drops the chunks that are left. A warning says so, unless they are entries of a tensor that has one equal
    entry for each slot: ``Trainer`` of transformers passes a count in that way, and its last batch may be small.
    """
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


class _IsAnyWrapper(ABCMeta):
    """``isinstance(model, torch.nn.DataParallel)`` is true of torch's own wrappers and of the library's too.

    It is an ``ABCMeta`` because subclasses may have abstract classes as other bases.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a wrapper of torch's own class for an optimizer, a scheduler, or what else is no module."""
        wrapped = args[0] if args else kwargs.get("module")
        if cls is DataParallel and wrapped is not None and not isinstance(wrapped, nn.Module):
            return TorchDataParallel(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, TorchDataParallel) if cls is DataParallel else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, TorchDataParallel) if cls is DataParallel else super().__subclasscheck__(subclass)


def _pickled(cls: _IsAnyWrapper) -> str | tuple[Any, ...]:
    """How a class is pickled: `DataParallel` by torch's name, so that files are for programs with torch alone too."""
    return (pkgutil.resolve_name, ("torch.nn:DataParallel",)) if cls is DataParallel else cls.__qualname__


copyreg.pickle(_IsAnyWrapper, _pickled)

WITHOUT_SLOTS = "DataParallel (no slots)"
"""Counts wrappers that run the model as it is, because there is no accelerator and the program names no slots."""

_forward = wrappers.DataParallel.forward  # looked up here: the compiler cannot trace the lookup


_STAGES = {
    "replicate": (("torch.nn.parallel.data_parallel", "replicate"),),
    "scatter": (
        ("torch.nn.parallel.data_parallel", "scatter_kwargs"),
        ("torch.nn.parallel.scatter_gather", "scatter"),
    ),
    "parallel_apply": (("torch.nn.parallel.data_parallel", "parallel_apply"),),
    "gather": (("torch.nn.parallel.data_parallel", "gather"),),
}
"""The functions that each stage of torch's class looks up, by module and name."""


def _stage(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs the stage: as torch does if the program has put a function of its own in torch's place."""
    places = [(sys.modules[module], entry, getattr(sys.modules[module], entry)) for module, entry in _STAGES[name]]

    def is_own() -> bool:
        found = [(getattr(module, entry), theirs) for module, entry, theirs in places]
        return all(now is theirs or str(now.__module__).startswith("dataparallel.") for now, theirs in found)

    @functools.wraps(own)
    def stage(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = isinstance(self, wrappers.DataParallel) and is_own()
        return (own if is_ours else getattr(TorchDataParallel, name))(self, *args, **kwargs)

    wrappers.own_stages[stage] = is_own
    return stage


def _scatter(
    self: DataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]
) -> Any:
    inputs, kwargs = as_torch_splits(Arguments((inputs, kwargs)), self.dim, len(device_ids))
    return wrappers.DataParallel.scatter(self, inputs, kwargs, device_ids)


class Once(wrappers.DataParallel[Any]):
    """The wrapper of a call of `data_parallel`, with gradients as in `DataParallel`."""

    _dataparallel_as_torch = True


class _AfterTorch(wrappers.DataParallel[Any]):
    """What comes behind ``torch.nn.DataParallel`` in the order of bases: in torch a plain module, without arguments."""

    def __init__(self) -> None:
        super(TorchDataParallel, self).__init__()


class DataParallel(_AfterTorch, metaclass=_IsAnyWrapper):
    """`dataparallel.DataParallel` in the place of ``torch.nn.DataParallel``.

    Hooks stay functions of the source, as in torch: a library may find what they saved by the module in their closure.
    The gradient of a parameter that no replica used is zeros, as in torch, if another one has a gradient.
    What ``forward`` writes into a list or dict that it got is lost, as in torch: a program may go on with its own.
    All other objects, and empty lists and dicts, are the program's own in all replicas.

    A class that was derived from torch's before calls this one's methods by the name, on its own instances. They are
    torch's.
    """

    _dataparallel_as_torch = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, wrappers.DataParallel):
            TorchDataParallel.__init__(self, *args, **kwargs)
            return
        wrappers.DataParallel.__init__(self, *args, **kwargs)
        counts.note_call("DataParallel" if self.device_ids else WITHOUT_SLOTS)

    @_torch.not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As `dataparallel.DataParallel.forward`, with `as_torch_splits`, unless a subclass splits inputs."""
        if not isinstance(self, wrappers.DataParallel):
            return TorchDataParallel.forward(self, *inputs, **kwargs)
        if not torch.compiler.is_dynamo_compiling():  # without devices the compiler traces this, and knows no locks
            counts.note_call("DataParallel.forward")
        if self.device_ids and wrappers.is_own_stage(self.scatter):
            inputs, kwargs = as_torch_splits(Arguments((inputs, kwargs)), self.dim, len(self.device_ids))
        return _forward(self, *inputs, **kwargs)

    scatter = _stage("scatter", _scatter)
    replicate = _stage("replicate", wrappers.DataParallel.replicate)
    parallel_apply = _stage("parallel_apply", wrappers.DataParallel.parallel_apply)
    gather = _stage("gather", wrappers.DataParallel.gather)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what torch's class has and the program has added: a file of the whole model needs torch alone."""
        return {name: value for name, value in vars(self).items() if name != "_dataparallel"}
