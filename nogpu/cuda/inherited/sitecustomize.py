"""Python runs this file at the start of each process that inherits a stand-in for CUDA; nobody imports it.

It runs the ``sitecustomize`` that this one hides, and waits for the import of torch: a process without torch pays
nothing. ``start`` puts the folder on the path.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, *[os.pardir] * 3))


class BeforeTorch:
    """Is asked for each module that is imported or looked for."""

    is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Answers for torch, with a module that starts the stand-in; leaves every other module to others."""
        if name != "torch" or self.is_asking or not os.environ.get("NOGPU_STAND_IN"):
            return None
        self.is_asking = True  # `spec_of_torch` asks all finders
        try:
            if "nogpu" not in sys.modules:
                load("nogpu", [ROOT])  # the parent's, whatever the path of this process has
            from nogpu.cuda.start import spec_of_torch

            return spec_of_torch()
        finally:
            self.is_asking = False


def load(name: str, path: list[str]) -> None:
    """Imports a module from a path, if it is there."""
    spec = PathFinder.find_spec(name, path)
    if spec is not None and spec.loader is not None:
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, BeforeTorch())
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    load("sitecustomize", sys.path)
