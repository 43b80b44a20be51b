"""CuPy as installed, on the stand-in: its modules are redirected when they are imported, before their first call.

`libraries` calls `prepare` whether CuPy is installed or not. This file does not import CuPy. Kernels are compiled by
the stand-in for NVRTC, see `nvrtc`.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

from dataparallel.testing.compiling import SimulationTooLate
from dataparallel.testing.cuda.redirect import carries_runtime, redirect

__all__ = ["prepare"]

PACKAGES = ("cupy", "cupy_backends", "cupyx")


def prepare(runtime: Path) -> None:
    """Sees to it that CuPy's modules call the stand-in's runtime, here and now.

    Args:
        runtime: the file of the stand-in's runtime, which is open.

    Raises:
        SimulationTooLate: if CuPy has been imported.
    """
    if any(name in sys.modules for name in PACKAGES):
        raise SimulationTooLate("CuPy has been imported already: start the stand-in before")
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(runtime))
    # CUB's kernels are in CuPy's files, compiled for GPUs. Without it CuPy reduces by kernels that it compiles.
    os.environ.setdefault("CUPY_ACCELERATORS", "")


class _Finder(MetaPathFinder):
    """Finds CuPy's extension modules as usual, with another loader for those that carry a runtime."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            file = Path(spec.loader.path)
            if carries_runtime(file):
                spec.loader = _Loader(fullname, str(file), self.runtime)
        return spec


class _Loader(importlib.machinery.ExtensionFileLoader):
    """Redirects a module between its loading and its first line."""

    def __init__(self, name: str, path: str, runtime: Path) -> None:
        super().__init__(name, path)
        self.runtime = runtime

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = super().create_module(spec)
        redirect(Path(self.path), self.runtime)
        return module
