"""`replace_torch` puts the library in the place of ``torch.nn.DataParallel`` and its relatives, and takes it back.

It changes names only: of torch's modules, and of all other modules that have imported them by name. Objects that exist
stay what they are.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, TracebackType
from typing import Any

from dataparallel.integrations import torch_names, torch_rules, torch_wrapper

_lock = threading.Lock()  # guards `_active`, and the names while they change
_active: list[Replacement] = []

_LEFT_ALONE = ("torch.nn.parallel.", "dataparallel.")
"""Prefixes of modules in which no other names are replaced than `torch_names.NAMES` has for them.

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
        calls = torch_rules.counts.calls()
        lines += [f"  {name:24} called {number} times" for name, number in calls.items()]
        if not calls:
            lines.append("  nothing was called")
        fallbacks = torch_rules.counts.fallbacks()
        lines += [f"  {number} times as torch does: {rule}" for rule, number in fallbacks.items()]
        left = ", ".join(sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in _torch_subclasses()))
        if left:
            lines.append(f"  classes that were derived from torch's DataParallel before, and stay torch's: {left}")
        return "\n".join(lines)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def replace_torch() -> Replacement:
    """Has code that was written for ``torch.nn.DataParallel`` use this library, without changing it.

    ``torch.nn.DataParallel``, ``torch.nn.parallel.{DataParallel, data_parallel, replicate, scatter, gather,
    parallel_apply}``, the functions of ``torch.nn.parallel.comm``, and names that other modules have imported from
    there become this library's. Modules that are imported later get them from torch. Models that are wrapped already
    stay as they are. ``isinstance(model, torch.nn.DataParallel)`` is true of wrappers of both.

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
    for module, names in torch_names.NAMES.items()
    for name, ours in names.items()
]
"""torch's objects, and what replaces each."""


def _swap(replaced_by: dict[int, Any]) -> list[str]:
    """Replaces objects, which are given by their ids, in all modules, and returns where."""
    swapped = []
    for module_name, module in [*sys.modules.items()]:
        if not isinstance(module, ModuleType):
            continue
        only = torch_names.NAMES.get(module_name)
        if only is None and module_name.startswith(_LEFT_ALONE):
            continue
        for name, value in [*vars(module).items()]:
            new = replaced_by.get(id(value))
            if new is not None and (only is None or name in only):
                setattr(module, name, new)
                swapped.append(f"{module_name}.{name}")
    return sorted(swapped)


def _torch_subclasses() -> Iterator[type]:
    """Yields classes that are derived from torch's class and not from the library's."""
    for cls in torch_wrapper.TorchDataParallel.__subclasses__():
        if not cls.__module__.startswith("dataparallel."):
            yield cls
