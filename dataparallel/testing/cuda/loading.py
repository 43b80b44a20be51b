"""Operators of libraries that are loaded after the start, such as torchvision's: computed by their kernels for the CPU.

Python opens a library in two ways: as an extension module, and with ``ctypes``, as ``torch.ops.load_library`` does.
The kernels for CUDA that the library registers meanwhile are replaced before anything can call them. What a program
registers in Python stays as it is: such a kernel is made of other operators.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
from collections.abc import Callable
from typing import Any

__all__ = ["watch"]


def watch(compiled: Any) -> None:
    """Sees to the operators of every library that is opened from now on. ``start`` calls it once."""
    for owner, name in ((importlib.machinery.ExtensionFileLoader, "create_module"), (ctypes.CDLL, "__init__")):
        setattr(owner, name, _watched(getattr(owner, name), compiled))


def _watched(opening: Callable[..., Any], compiled: Any) -> Callable[..., Any]:
    @functools.wraps(opening)
    def watched(*args: Any, **options: Any) -> Any:
        before = compiled.operators_now()
        result = opening(*args, **options)
        compiled.compute_those_since(before)
        return result

    return watched
