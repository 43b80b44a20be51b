"""`description` of this machine: what ``python -m dataparallel`` prints.

A context on a device costs hundreds of MB, so none is made here and CUDA stays uninitialised. CuPy is looked up but not
imported. Names, memory and links of GPUs are for ``nvidia-smi`` to show.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Sequence

import torch

from dataparallel._version import __version__
from dataparallel.comm import settings
from dataparallel.comm.peers import PEER_CHECK_VARIABLE, peers_are_checked
from dataparallel.devices import all_devices

_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


def description() -> str:
    """What this machine has, what carries tensors between its devices, and what to do next."""
    devices = all_devices()
    lines = [
        ("dataparallel", __version__),
        ("torch", f"{torch.__version__} ({about_torch()}), Python {platform.python_version()}"),
        ("accelerator", about(devices)),
        ("transport", about_transport()),
        ("peer check", _peer_check()),
        ("CuPy", about_cupy()),
    ]
    return "\n\n".join([_facts(lines), "what to do next\n" + _facts(next_steps(devices), "  ")])


def _facts(lines: Sequence[tuple[str, str]], indent: str = "") -> str:
    width = 2 + max(len(name) for name, _ in lines)
    return "\n".join(f"{indent}{name:<{width}}{text}" for name, text in lines)


def about(devices: Sequence[torch.device]) -> str:
    if not devices:
        return "none"
    text = f"{devices[0].type}, {len(devices)} device{'s' * (len(devices) > 1)}"
    started = sys.modules.get("nogpu.cuda")
    is_stand_in = started is not None and started.is_stand_in()
    return f"{text} of a stand-in for CUDA, which computes on the CPU: no GPU" if is_stand_in else text


def about_torch() -> str:
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    return "no CUDA, no HIP" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def about_transport() -> str:
    try:
        asked = settings.current()
    except ValueError as error:
        return str(error)
    default = "torch's copies; for fully_shard kernels that read peers, if CuPy is there and NVLink joins all"
    return f"{asked!r} was asked for" if asked else default


def _peer_check() -> str:
    if not peers_are_checked():
        return f"off, by {PEER_CHECK_VARIABLE}: data that arrives changed is not noticed"
    return "each pair of devices is tried with random data before its first use; a pair that fails goes by the host"


def about_cupy() -> str:
    """The installed CuPy distributions, from their metadata: an import takes seconds and memory, and may fail."""
    found = []
    for name in _CUPY:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "not installed"


def next_steps(devices: Sequence[torch.device]) -> list[tuple[str, str]]:
    if len(devices) > 1:
        script = f'model = DataParallel(model.to("{devices[0].type}"))  # one replica on each of {len(devices)} devices'
    else:
        slots, place = ("[0, 0]", "one device") if devices else ('["cpu", "cpu"]', "the CPU")
        script = f"model = DataParallel(model, device_ids={slots})  # to try it: two replicas on {place}, not faster"
    return [
        ("in your script", script),
        ("does it work here", "python -m dataparallel --check"),
        ("if it is slow", "torch.profiler around a few steps shows the library's ranges: docs/guide/performance.rst"),
        ("in your tests", "nogpu.simulate(4)  # four simulated accelerators"),
        ("to read", "docs/guide/training.rst, docs/coming_from.rst, docs/guide/examples.rst of the checkout"),
    ]
