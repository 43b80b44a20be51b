"""What the simulated accelerators are compiled from. `simulate` calls this file; ``compiling`` does the work."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from dataparallel.testing import compiling

__all__ = ["EXTENSION", "load_extension"]

_FOLDERS = tuple(Path(__file__).parents[1] / "csrc" / name for name in ("shared", "simulated"))

EXTENSION = compiling.Extension(
    name="dataparallel_simulated",
    what="simulated accelerators",
    folders=_FOLDERS,
    include_paths=_FOLDERS,
)


def load_extension() -> ModuleType:
    """Returns the module with the devices, see `compiling.load_extension`."""
    return compiling.load_extension(EXTENSION)
