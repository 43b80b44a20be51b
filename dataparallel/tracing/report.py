"""A description of this machine: the text behind ``python -m dataparallel``.

A context on a device costs hundreds of MB, so none is made here and CUDA stays uninitialised: names, memory and peer
access of NVIDIA GPUs come from NVML, and CuPy is looked up but not imported.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl

from dataparallel import ownership
from dataparallel._version import __version__
from dataparallel.comm import choose_transport
from dataparallel.comm.choice import Collective
from dataparallel.comm.settings import current
from dataparallel.devices import CPU, all_devices

_CUPY_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")

# In the order of a training step. Only the second, broadcast, is shown if the user asks for nothing.
_OPERATIONS: tuple[Collective, ...] = ("scatter", "broadcast", "reduce_add", "gather")

# Numbers instead of pynvml's names: some releases define NVML_P2P_CAPS_INDEX_READ as a tuple by mistake.
_P2P_READ, _P2P_WRITE, _P2P_OK = 0, 1, 0


def report() -> str:
    """Looks at this machine, and returns lines of text. The last ones say what to do next."""
    devices = all_devices()
    about_nvml, *gpus = look_at_nvml()
    lines = (
        f"dataparallel  {__version__}",
        f"torch         {torch.__version__} ({torch_build()}), Python {platform.python_version()}",
        f"CPU           {look_at_cpu()}",
        f"accelerator   {in_words(devices)}",
        f"NVML          {about_nvml}",
        *(f"  GPU {number:<8}{gpu}" for number, gpu in enumerate(gpus)),
        f"NCCL          {look_for_nccl()}",
        f"CuPy          {look_for_cupy()}",
        *transport_lines(devices or [CPU] * 2),
        f"reuse         {look_at_reuse()}",
        *next_lines(devices),
    )
    return "\n".join(lines)


def in_words(devices: Sequence[torch.device]) -> str:
    """How many accelerators there are, and whether a stand-in for CUDA answers for them."""
    if not devices:
        return "none"
    text = f"{devices[0].type}, {len(devices)} device{'s' * (len(devices) > 1)}"
    started = sys.modules.get("dataparallel.testing.cuda")
    if started is None or not started.is_stand_in():
        return text
    return text + (
        " of a stand-in: CUDA's and NCCL's functions are answered by it, kernels are computed on the CPU; no GPU"
    )


def torch_build() -> str:
    """The accelerators that torch was compiled for."""
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "no CUDA, no HIP"


def look_at_cpu(meminfo: Path = Path("/proc/meminfo")) -> str:
    """Cores and memory of the host."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    text = f"{cores} cores, {usable} for this process"
    if not meminfo.exists():
        return text
    kib = {key: int(value) for key, value in re.findall(r"(\w+): +(\d+) kB", meminfo.read_text())}
    return f"{text}; {_memory(kib['MemTotal'] * 1024, kib['MemAvailable'] * 1024)}"


def look_for_nccl() -> str:
    """The version of the NCCL (on ROCm: RCCL) in this build of torch."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "not in this build of torch"
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def look_for_cupy() -> str:
    """The installed CuPy distributions, from their metadata: an import takes seconds and memory, and may fail."""
    found = []
    for name in _CUPY_DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "not installed"


def look_at_reuse() -> str:
    """Tells if calls use replicas and copies of earlier calls again."""
    why_not = ownership.why_not_trusted()
    if why_not is None:
        return "replicas and copies that nobody else has are used again"
    return f"each call makes its own replicas and copies, because reference counts are not trusted: {why_not}"


def transport_lines(devices: Sequence[torch.device]) -> list[str]:
    """The transport of each operation of ``comm``, and why. One line if the user asks for no transport and no route."""

    def describe(operation: Collective) -> str:
        try:
            choice = choose_transport(devices, operation)
        except ValueError as error:
            return f"refused: {error}"
        condition = ", if all devices have peer access" if choice.transport == "cupy" else ""
        return f"{choice.transport}: {choice.reason}{condition}"

    try:
        asked = current()
    except ValueError as error:
        return [f"transport     refused: {error}"]
    operations = _OPERATIONS if asked.transport or asked.route else _OPERATIONS[1:2]
    found = {operation: describe(operation) for operation in operations}
    if len({*found.values()}) == 1:
        return [f"transport     {found['broadcast']}"]
    return ["transport     as asked for", *(f"  {name:<12}{text}" for name, text in found.items())]


def look_at_nvml() -> list[str]:
    """Asks NVML, if its Python binding is installed."""
    if importlib.util.find_spec("pynvml") is None:
        return ["not asked: nvidia-ml-py is not installed"]
    return ask_nvml(importlib.import_module("pynvml"), os.environ.get("CUDA_VISIBLE_DEVICES"))


def ask_nvml(nvml: Any, visible: str | None) -> list[str]:
    """Asks ``nvml``, a module with pynvml's functions, about all GPUs. ``visible`` is CUDA_VISIBLE_DEVICES."""
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            gpus = [f"{nvml.nvmlDeviceGetName(h)}, {_gpu_memory(nvml, h)}, {_peers(nvml, h, handles)}" for h in handles]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return [f"failed: {error}"]
    shown = "not set" if visible is None else repr(visible)
    return [f"all GPUs by NVML's numbers, which may differ from CUDA's; CUDA_VISIBLE_DEVICES is {shown}", *gpus]


def _gpu_memory(nvml: Any, handle: Any) -> str:
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return f"memory not shown: NVML says {error}"  # a GPU that shares the host's memory, for example
    return _memory(info.total, info.free)


def _peers(nvml: Any, handle: Any, handles: Sequence[Any]) -> str:
    """The numbers of the GPUs whose memory the GPU of ``handle`` can read and write."""
    peers = []
    try:
        for number, other in enumerate(handles):
            if other != handle:
                statuses = {nvml.nvmlDeviceGetP2PStatus(handle, other, index) for index in (_P2P_READ, _P2P_WRITE)}
                if statuses == {_P2P_OK}:
                    peers.append(str(number))
    except nvml.NVMLError as error:
        return f"peers not shown: NVML says {error}"
    return f"peers {' '.join(peers) or 'none'}"


def next_lines(devices: Sequence[torch.device]) -> list[str]:
    """What to do next."""
    if len(devices) > 1:
        script = f'model = DataParallel(model.to("{devices[0].type}"))  # one replica on each of {len(devices)} devices'
    else:
        slots, place = ("[0, 0]", "one device") if devices else ('["cpu", "cpu"]', "the CPU")
        script = f"model = DataParallel(model, device_ids={slots})  # to try it: two replicas on {place}, not faster"
    return [
        "",
        "what to do next",
        f"  in your script    {script}",
        "  if it is slow     with dataparallel.trace() as trace: ...  # around a few steps, then print(trace)",
        "  in your tests     dataparallel.testing.simulate(4)  # four simulated accelerators",
        "  in a checkout     pytest  # runs the tests; pytest bench measures what the library costs",
        "  to read           README.rst and docs/ of the checkout",
    ]


def _memory(total: int, free: int) -> str:
    total_gib, used_gib, free_gib = (f"{n / 2**30:.1f} GiB" for n in (total, total - free, free))
    return f"memory {total_gib}, {used_gib} used, {free_gib} free"
