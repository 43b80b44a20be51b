"""The compiled front end for torch: operators by CPU kernels for CUDA tensors, and clocks that watch the runtime.

It can be loaded only after torch, which must have found the stand-in's libraries. `start` loads it once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nogpu.compiling import Extension, load_extension
from nogpu.cuda import libraries

CSRC = Path(__file__).parents[1] / "csrc"

C: Any = None


def load() -> Any:
    """Returns the module, which is ``C`` from now on.

    Raises:
        SimulationUnavailable: see `load_extension`.
    """
    global C
    C = load_extension(_extension())
    return C


def _extension() -> Extension:
    folders = (CSRC / "shared", CSRC / "cuda")
    return Extension(
        name="nogpu_cuda",
        what="operators of the stand-in for CUDA",
        folders=folders,
        flags=("-O2", "-fvisibility=hidden", "-DNDEBUG", "-DNOGPU_CUDA"),
        link_flags=("-lc10_cuda", "-ltorch_cuda"),
        include_paths=(*folders, CSRC / "runtime", *libraries.include_paths()),
    )
