"""`DataParallel` in the place of torch's class, for programs that were written for that one.

It keeps what such programs do with torch's class beside calling it: they derive from it, pickle whole models, patch the
functions of its module, and wrap optimizers.
"""

from __future__ import annotations

import copyreg
import functools
import pkgutil
import sys
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dataparallel.batches.structures import Arguments
from dataparallel.devices import DeviceLike
from dataparallel.forms import data_parallel as wrappers
from dataparallel.forms.signatures import shows_forward_of_module
from dataparallel.integrations import torch_rules
from dataparallel.integrations.torch_rules import as_torch_splits

TorchDataParallel = nn.DataParallel
"""torch's own class. `replace_torch` changes the name ``torch.nn.DataParallel``, not this one."""


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
    """`dataparallel.DataParallel.scatter`, with `as_torch_splits`."""
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
        torch_rules.counts.note_call("DataParallel" if self.device_ids else WITHOUT_SLOTS)

    @shows_forward_of_module
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As `dataparallel.DataParallel.forward`, with `as_torch_splits`, unless a subclass splits inputs."""
        if not isinstance(self, wrappers.DataParallel):
            return TorchDataParallel.forward(self, *inputs, **kwargs)
        if not torch.compiler.is_dynamo_compiling():  # without devices the compiler traces this, and knows no locks
            torch_rules.counts.note_call("DataParallel.forward")
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
