"""`look` describes this machine: what ``python -m dataparallel`` prints, and what its page shows.

A context on a device costs hundreds of MB, so none is made here and CUDA stays uninitialised: names, memory and peer
access of NVIDIA GPUs come from NVML, and CuPy is looked up but not imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl

from dataparallel._version import __version__
from dataparallel.comm import choose_transport
from dataparallel.comm.settings import current
from dataparallel.comm.transport_choice import PLAIN, Collective
from dataparallel.devices import CPU, all_devices
from dataparallel.tracing.report_parts import Facts, Links, Section, Table, as_text

_CUPY_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")

# In the order of a training step. Only the second, broadcast, is shown if the user asks for nothing.
_OPERATIONS: tuple[Collective, ...] = ("scatter", "broadcast", "reduce_add", "gather")

# Numbers instead of pynvml's names: some releases define NVML_P2P_CAPS_INDEX_READ as a tuple by mistake.
_P2P, _P2P_OK = (0, 1, 2), 0  # read, write, NVLink
_NVLINK = "NVLink"

_BUCKETS = (2**16, 2**20, 10 * 2**20, 25 * 2**20, 100 * 2**20)

# The operations that have routes.
_ROUTED: dict[Collective, str] = {
    "broadcast": "Weights, from the first device to all others (broadcast)",
    "reduce_add": "Gradients, from all devices to the first (sum)",
}


def look() -> list[Section]:
    """Looks at this machine. The last section says what to do next."""
    devices = all_devices()
    about_nvml, gpus = look_at_nvml()
    facts = Facts(
        [
            ("dataparallel", __version__),
            ("torch", f"{torch.__version__} ({torch_build()}), Python {platform.python_version()}"),
            ("CPU", look_at_cpu()),
            ("accelerator", in_words(devices)),
            ("NVML", about_nvml),
            *((f"  GPU {number}", str(gpu)) for number, gpu in enumerate(gpus)),
            ("NCCL", look_for_nccl()),
            ("CuPy", look_for_cupy()),
            *transport_facts(devices or [CPU] * 2),
        ]
    )
    sections = [Section("", [facts, *links_of(devices, gpus)])]
    if len(devices) > 1:
        sections.append(Section("what a bucket would take", bucket_tables(devices)))
    return [*sections, next_steps(devices)]


def report() -> str:
    """The sections of `look` as text."""
    return as_text(look())


def links_of(devices: Sequence[torch.device], gpus: Sequence[Gpu]) -> list[Links]:
    """A picture of all GPUs that NVML sees or, without NVML, of the accelerators, whose links are not known."""
    if gpus:
        ways = {(one, other): way for one, gpu in enumerate(gpus) for other, way in gpu.ways.items() if one < other}
        is_known = all(isinstance(gpu.peers, dict) for gpu in gpus)
        return [Links([(f"GPU {number}", gpu.lines()) for number, gpu in enumerate(gpus)], ways if is_known else None)]
    return [Links([(str(device), ()) for device in devices], None)] if devices else []


def bucket_tables(devices: Sequence[torch.device]) -> list[Table]:
    """For buckets of several sizes the transport and the route between ``devices``, and why."""

    def row(work: Collective, nbytes: int) -> tuple[str, str, str, str]:
        size = f"{nbytes // 2**10} KiB" if nbytes < 2**20 else f"{nbytes // 2**20} MiB"
        try:
            choice = choose_transport(devices, work, nbytes)
        except ValueError as error:
            return size, "refused", "", str(error)
        return size, choice.transport, choice.route, choice.reason.removeprefix(f"{PLAIN}; {choice.route}: ")

    return [
        Table(title, ("bucket", "transport", "route", "why"), [row(work, size) for size in _BUCKETS], words=(1, 2, 3))
        for work, title in _ROUTED.items()
    ]


def in_words(devices: Sequence[torch.device]) -> str:
    """How many accelerators there are, and whether a stand-in for CUDA answers for them."""
    if not devices:
        return "none"
    text = f"{devices[0].type}, {len(devices)} device{'s' * (len(devices) > 1)}"
    started = sys.modules.get("nogpu.cuda")
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


def transport_facts(devices: Sequence[torch.device]) -> list[tuple[str, str]]:
    """The transport of each operation of ``comm``, and why. One fact if the user asks for no transport and no route."""

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
        return [("transport", f"refused: {error}")]
    operations = _OPERATIONS if asked.transport or asked.route else _OPERATIONS[1:2]
    found = {operation: describe(operation) for operation in operations}
    if len({*found.values()}) == 1:
        return [("transport", found["broadcast"])]
    return [("transport", "as asked for"), *((f"  {name}", text) for name, text in found.items())]


@dataclass(frozen=True)
class Gpu:
    """What NVML says of a GPU.

    Attributes:
        name: the product.
        memory: bytes in all and bytes that are free, or why they are not known.
        peers: the numbers of GPUs whose memory it can read and write, each with what joins the two: "NVLink" or "peer
            access" (another way, such as PCIe). Or why they are not known.
    """

    name: str
    memory: tuple[int, int] | str
    peers: dict[int, str] | str

    @property
    def ways(self) -> dict[int, str]:
        """`peers`, and none if they are not known."""
        return {} if isinstance(self.peers, str) else self.peers

    def lines(self) -> list[str]:
        """For a picture."""
        if isinstance(self.memory, str):
            return [self.name]
        total, free = self.memory
        return [self.name, f"{_gib(free)} of {_gib(total)} free"]

    def __str__(self) -> str:
        memory = self.memory if isinstance(self.memory, str) else _memory(*self.memory)
        if isinstance(self.peers, str):
            return f"{self.name}, {memory}, {self.peers}"
        numbers = " ".join(map(str, self.peers)) or "none"
        linked = [str(number) for number, way in self.peers.items() if way == _NVLINK]
        return f"{self.name}, {memory}, peers {numbers}" + (f", NVLink to {' '.join(linked)}" if linked else "")


def look_at_nvml() -> tuple[str, list[Gpu]]:
    """Asks NVML, if its Python binding is installed."""
    if importlib.util.find_spec("pynvml") is None:
        return "not asked: nvidia-ml-py is not installed", []
    return ask_nvml(importlib.import_module("pynvml"), os.environ.get("CUDA_VISIBLE_DEVICES"))


def ask_nvml(nvml: Any, visible: str | None) -> tuple[str, list[Gpu]]:
    """Asks ``nvml``, a module with pynvml's functions, about all GPUs. ``visible`` is CUDA_VISIBLE_DEVICES."""
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            gpus = [Gpu(nvml.nvmlDeviceGetName(h), _gpu_memory(nvml, h), _peers(nvml, h, handles)) for h in handles]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return f"failed: {error}", []
    shown = "not set" if visible is None else repr(visible)
    return f"all GPUs by NVML's numbers, which may differ from CUDA's; CUDA_VISIBLE_DEVICES is {shown}", gpus


def _gpu_memory(nvml: Any, handle: Any) -> tuple[int, int] | str:
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return f"memory not shown: NVML says {error}"  # a GPU that shares the host's memory, for example
    return info.total, info.free


def _peers(nvml: Any, handle: Any, handles: Sequence[Any]) -> dict[int, str] | str:
    """The GPUs whose memory the GPU of ``handle`` can read and write: `Gpu.peers`."""
    peers = {}
    try:
        for number, other in enumerate(handles):
            if other != handle:
                by_read, by_write, by_nvlink = (nvml.nvmlDeviceGetP2PStatus(handle, other, i) for i in _P2P)
                if by_read == by_write == _P2P_OK:
                    peers[number] = _NVLINK if by_nvlink == _P2P_OK else "peer access"
    except nvml.NVMLError as error:
        return f"peers not shown: NVML says {error}"
    return peers


def next_steps(devices: Sequence[torch.device]) -> Section:
    """What to do next."""
    if len(devices) > 1:
        script = f'model = DataParallel(model.to("{devices[0].type}"))  # one replica on each of {len(devices)} devices'
    else:
        slots, place = ("[0, 0]", "one device") if devices else ('["cpu", "cpu"]', "the CPU")
        script = f"model = DataParallel(model, device_ids={slots})  # to try it: two replicas on {place}, not faster"
    steps = [
        ("in your script", script),
        ("if it is slow", "with dataparallel.trace() as trace: ...  # around a few steps, then print(trace)"),
        ("in your tests", "nogpu.simulate(4)  # four simulated accelerators"),
        ("in a checkout", "pytest  # runs the tests; pytest bench measures what the library costs"),
        ("to read", "docs/guide/training.rst, docs/coming_from.rst, docs/guide/examples.rst of the checkout"),
    ]
    return Section("what to do next", [Facts(steps, "code")])


def _memory(total: int, free: int) -> str:
    return f"memory {_gib(total)}, {_gib(total - free)} used, {_gib(free)} free"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
