"""Whether this process can have a stand-in for CUDA: the system, torch's build, GPUs, and what is imported already.

It answers without importing torch, because afterwards it is too late. `start` calls this file.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

from nogpu.compiling import SimulationTooLate, SimulationUnavailable, ToolsMissing

CUDA = 13
"""The release of CUDA whose functions are answered: libraries and headers of others have other names."""

# Of NVIDIA's drivers: for cards, for Jetson, and for Windows' subsystem for Linux.
GPU_FILES = ("nvidia[0-9]*", "nvgpu", "nvhost-gpu", "dxg")


def check_process(hide_gpus: bool = False) -> None:
    """Raises if this process cannot have a stand-in, with a sentence that says what to do.

    Raises:
        ToolsMissing: if the system is not Linux, or torch is missing or was built for no CUDA or for another one.
        SimulationUnavailable: if the machine has a GPU, unless it is to be hidden.
        SimulationTooLate: if torch has been imported.
    """
    why_not = why_not_here()
    if why_not is not None:
        raise ToolsMissing(why_not)
    found = gpus()
    if found and not hide_gpus:
        raise SimulationUnavailable(
            f"this machine has a GPU ({', '.join(found)}), which a stand-in for CUDA would hide from this process and "
            "its children. Use the GPU, or pass hide_gpus=True (--hide-gpus on the command line)"
        )
    if "torch" in sys.modules:
        raise SimulationTooLate(
            "torch has been imported in this process, and has looked for CUDA then: call "
            "nogpu.cuda.stand_in before anything imports torch, or start the program with "
            "python -m nogpu.cuda"
        )


def why_not_here() -> str | None:
    """Why no process of this interpreter can have a stand-in, or ``None``. GPUs do not matter."""
    if not sys.platform.startswith("linux"):
        return f"a stand-in for CUDA needs Linux; this is {sys.platform}"
    file = file_of_torch()
    if file is None:
        return f"a stand-in for CUDA needs a torch built for CUDA {CUDA}, and this Python has no torch: install it"
    version = _version_of_torch(file)
    built = f"torch {version.get('__version__', 'of an unknown version')} was built for"
    cuda = version.get("cuda")
    if cuda is None:
        others = {"ROCm": version.get("hip"), "XPU": version.get("xpu")}
        instead = next((name for name, release in others.items() if release), "the CPU only")
        return f"a stand-in for CUDA needs a torch built for CUDA {CUDA}, and {built} {instead}: install that build"
    if cuda.split(".")[0] != str(CUDA):
        return f"a stand-in answers for CUDA {CUDA}, and {built} CUDA {cuda}: install a torch for CUDA {CUDA}"
    return None


def file_of_torch() -> Path | None:
    """The file that ``import torch`` runs, or ``None``."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _version_of_torch(file: Path) -> dict[str, Any]:
    path = file.with_name("version.py")
    return runpy.run_path(str(path)) if path.exists() else {}


def gpus(devices: Path = Path("/dev")) -> list[str]:
    """The files by which NVIDIA's driver would be reached. CUDA itself is not asked: it could not be replaced then."""
    return sorted(str(path) for pattern in GPU_FILES for path in devices.glob(pattern))
