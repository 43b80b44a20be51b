"""How another process finds a function or a class: by the file of its module and its name.

So tests need not be importable: pytest imports them by their files, and scripts are ``__main__``. ``processes`` and
``cases`` say where something is, and the process of a rank loads it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Found", "find"]


@dataclass
class Found:
    """Where a function or a class is, so that another process finds it.

    Attributes:
        module: the name of its module.
        file: the module's file; the module may be in no folder of ``sys.path``.
        name: the qualified name in the module.
        packages: the names of the module's packages, outermost first, and their folders.
    """

    module: str
    file: str | None
    name: str
    packages: dict[str, list[str]] = field(default_factory=dict)

    def load(self) -> Any:
        """The function or the class, in another process than that which has found it."""
        return attrgetter(self.name)(_module(self))


def find(thing: Any) -> Found:
    """Where another process finds a function or a class.

    Raises:
        TypeError: if it is no function or class of a module.
    """
    name = getattr(thing, "__qualname__", type(thing).__name__)
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not thing or module is None:
        raise TypeError(
            f"the ranks look the function up in its module, where there is no {name}: pass a function that is defined "
            "at the top of its module, without a decorator that hides its name"
        )
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" and (file is None or not os.path.exists(file)):
        raise TypeError(f"other processes look {name} up in its file, but it comes from a prompt: put it in a file")
    packages = {}
    parts = module.__name__.split(".")
    for count in range(1, len(parts)):
        package = sys.modules.get(".".join(parts[:count]))
        packages[".".join(parts[:count])] = list(getattr(package, "__path__", []))
    return Found(module.__name__, None if file is None else os.path.abspath(file), name, packages)


def _module(found: Found) -> ModuleType:
    """The module that the test's process has under this name, made from the same file."""
    if found.module == "__main__":
        # As in torch.multiprocessing's processes: `if __name__ == "__main__":` is not for the ranks.
        assert found.file is not None
        module = _from_file("__mp_main__", found.file)
        sys.modules["__main__"] = module
        return module
    try:
        module = importlib.import_module(found.module)
        if found.file is None or _same(getattr(module, "__file__", None), found.file):
            return module
        del sys.modules[found.module]  # another file of this name
    except ImportError as error:
        if found.file is None or not _is_of(error, found):
            raise
    assert found.file is not None
    for name, folders in found.packages.items():
        if name not in sys.modules:
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = folders
    return _from_file(found.module, found.file)


def _same(one: str | None, other: str) -> bool:
    return one is not None and Path(one).exists() and Path(one).samefile(other)


def _is_of(error: ImportError, found: Found) -> bool:
    """If the module itself or one of its packages was not found, and not what it imports."""
    return error.name is not None and f"{found.module}.".startswith(f"{error.name}.")


def _from_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{file} is no file of Python that a rank can import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
