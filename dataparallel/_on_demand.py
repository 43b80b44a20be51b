"""Packages whose public names are imported when they are first asked for.

``dataparallel`` and ``dataparallel.testing`` are such packages: importing them must not import torch, because a
stand-in for CUDA has to be there before torch. ``dataparallel.composable`` is such a module.
This file knows no name of the library.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

# Python raises in one of two threads that wait for each other because one imports a folder and the other a file in it.
# Files of the library ask for no public name, so no thread waits for this lock while others wait for what it imports.
_one_thread = threading.RLock()


def import_on_demand(package: str, rooms: Mapping[str, tuple[str, ...]], others: tuple[str, ...] = ()) -> None:
    """Lets ``package`` import public names and submodules at their first use. The package or module itself calls it.

    A public name wins over a submodule of the same name, whoever has imported that submodule before.
    ``rooms``: the names that are public, by the module that has them. ``others``: those that are there already, and
    submodules. Together they are ``__all__``.
    """
    module = sys.modules[package]
    room_of = {name: room for room, names in rooms.items() for name in names}
    vars(module).update(_room_of=room_of, __all__=[*room_of, *others])
    module.__class__ = _Package


class _Package(ModuleType):
    # Methods of the class and no functions of the module: type checkers would take any name for one of the package.

    _room_of: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        room = self._room_of.get(name)
        if room is not None:
            with _one_thread:
                found = getattr(importlib.import_module(room), name)
            vars(self)[name] = found
            return found
        submodule = f"{self.__name__}.{name}"
        if not name.startswith("__"):
            try:
                return importlib.import_module(submodule)
            except ModuleNotFoundError as error:
                if error.name != submodule:
                    raise
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        # Python does this after it has imported a submodule.
        if name in self._room_of and value is sys.modules.get(f"{self.__name__}.{name}"):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._room_of})

    def __reduce__(self) -> Any:
        # Libraries that pickle functions with the modules that these name know the type of modules only.
        return importlib.import_module, (self.__name__,)
