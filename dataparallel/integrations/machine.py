"""`description` of this machine: what ``python -m dataparallel`` prints.

A context on a device costs hundreds of MB, so none is made here and CUDA stays uninitialised: names, memory and peer
access of NVIDIA GPUs come from NVML, and CuPy is looked up but not imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.cuda.nccl

from dataparallel._version import __version__
from dataparallel.comm import settings
from dataparallel.comm.peers import P2P_BY_NVLINK, P2P_OK, PEER_CHECK_VARIABLE, peers_are_checked
from dataparallel.devices import all_devices

_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_READ, _WRITE = 0, 1  # numbers, as for `P2P_BY_NVLINK`


def description() -> str:
    """What this machine has, what carries tensors between its devices, and what to do next."""
    devices = all_devices()
    lines = [
        ("dataparallel", __version__),
        ("torch", f"{torch.__version__} ({about_torch()}), Python {platform.python_version()}"),
        ("accelerator", about(devices)),
        *about_gpus(),
        ("transport", about_transport()),
        ("peer check", _peer_check()),
        ("NCCL", about_nccl()),
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


def about_nccl() -> str:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "not in this build of torch"
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def about_cupy() -> str:
    """The installed CuPy distributions, from their metadata: an import takes seconds and memory, and may fail."""
    found = []
    for name in _CUPY:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "not installed"


def about_gpus() -> list[tuple[str, str]]:
    if importlib.util.find_spec("pynvml") is None:
        return [("NVML", "not asked: nvidia-ml-py is not installed")]
    return ask_nvml(importlib.import_module("pynvml"), os.environ.get("CUDA_VISIBLE_DEVICES"))


def ask_nvml(nvml: Any, visible: str | None) -> list[tuple[str, str]]:
    """A line for each GPU by ``nvml``, a module with pynvml's functions. ``visible`` is CUDA_VISIBLE_DEVICES."""
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            gpus = [", ".join(_gpu(nvml, handle, handles)) for handle in handles]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return [("NVML", f"failed: {error}")]
    shown = "not set" if visible is None else repr(visible)
    head = f"all GPUs by NVML's numbers, which may differ from CUDA's; CUDA_VISIBLE_DEVICES is {shown}"
    return [("NVML", head), *((f"  GPU {number}", text) for number, text in enumerate(gpus))]


def _gpu(nvml: Any, handle: Any, handles: Sequence[Any]) -> Iterator[str]:
    """Name, memory, the GPUs whose memory it can read and write, and those of them that NVLink joins to it."""

    def asked(what: str, ask: Callable[[], str]) -> str:
        try:
            return ask()
        except nvml.NVMLError as error:
            return f"{what} not shown: NVML says {error}"  # a GPU that shares the host's memory, for example

    def memory() -> str:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return f"memory {info.total / 2**30:.1f} GiB, {info.free / 2**30:.1f} GiB free"

    def reached(*ways: int) -> str:
        others = [(number, other) for number, other in enumerate(handles) if other != handle]
        found = [n for n, other in others if all(nvml.nvmlDeviceGetP2PStatus(handle, other, w) == P2P_OK for w in ways)]
        return " ".join(map(str, found))

    def peers() -> str:
        linked = reached(_READ, _WRITE, P2P_BY_NVLINK)
        return f"peers {reached(_READ, _WRITE) or 'none'}" + (f", NVLink to {linked}" if linked else "")

    yield nvml.nvmlDeviceGetName(handle)
    yield asked("memory", memory)
    yield asked("peers", peers)


def next_steps(devices: Sequence[torch.device]) -> list[tuple[str, str]]:
    if len(devices) > 1:
        script = f'model = DataParallel(model.to("{devices[0].type}"))  # one replica on each of {len(devices)} devices'
    else:
        slots, place = ("[0, 0]", "one device") if devices else ('["cpu", "cpu"]', "the CPU")
        script = f"model = DataParallel(model, device_ids={slots})  # to try it: two replicas on {place}, not faster"
    return [
        ("in your script", script),
        ("does it work here", "python -m dataparallel --check"),
        ("if it is slow", "with dataparallel.trace(): ...  # around a few steps: prints where their time went"),
        ("in your tests", "nogpu.simulate(4)  # four simulated accelerators"),
        ("to read", "docs/guide/training.rst, docs/coming_from.rst, docs/guide/examples.rst of the checkout"),
    ]
