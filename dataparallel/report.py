"""What this machine offers, as a person reads it: the text behind ``python -m dataparallel``.

It describes and decides nothing: ``devices`` says which devices there are, ``comm`` which
transport carries tensors between them, and this room only asks. No other room calls it;
``__main__`` does, and a user may, to put the text into a bug report.

Touching a device costs hundreds of MB, so no context is made here and CUDA stays uninitialised:
names, memory and peer access of NVIDIA GPUs come from NVML, and CuPy is looked up, never imported.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl

from dataparallel import ownership
from dataparallel._version import __version__
from dataparallel.comm import choose_transport
from dataparallel.comm.choice import Collective
from dataparallel.comm.settings import current
from dataparallel.comm.topology import Link, Topology
from dataparallel.devices import all_devices

CUPY_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")

# In the order of a step.
_WORK: tuple[Collective, ...] = ("scatter", "broadcast", "reduce_add", "gather")

# Numbers, not pynvml's names: some releases define NVML_P2P_CAPS_INDEX_READ as a tuple by mistake.
_P2P_READ, _P2P_WRITE = 0, 1
_P2P_STATUS = {
    0: "yes",
    1: "no: chipset",
    2: "no: GPU",
    3: "no: I/O hub topology",
    4: "no: disabled by the driver's settings",
    5: "no",
    6: "unknown",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one memory."""

    total: int
    used: int
    free: int


@dataclass(frozen=True)
class Cpu:
    """The host: its cores, those that this process may use, its memory or why that is unknown."""

    cores: int
    usable: int
    memory: Memory | str


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU (or MIG instance) as NVML has it, with its memory or why that is unknown."""

    name: str
    memory: Memory | str


@dataclass(frozen=True)
class Nvml:
    """NVML's view of the GPUs that CUDA shows to this process, in CUDA's order as far as known.

    ``peers[i][j]`` says whether GPU ``i`` can read from and write to the memory of GPU ``j``.
    ``notes`` are sentences for the reader, errors among them.
    """

    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Transport:
    """How a bucket travels between the devices.

    ``asked`` is what a user asks for, empty where that is nothing. ``ways`` has for each call, by its name in ``comm``,
    the transport and the reason in words; only ``broadcast`` where nothing is asked for.
    """

    asked: str
    ways: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """Everything that ``format_report`` prints."""

    version: str
    torch_version: str
    torch_build: str
    python: str
    cpu: Cpu
    devices: tuple[torch.device, ...]
    nvml: Nvml
    nccl: str
    cupy: str
    transport: Transport
    reuse: str


def collect(environ: Mapping[str, str] = os.environ) -> Report:
    """Look at this machine. Makes no context on any device and does not initialise CUDA."""
    devices = all_devices()
    nvml = look_at_nvml(environ)
    return Report(
        version=__version__,
        torch_version=torch.__version__,
        torch_build=torch_build(),
        python=platform.python_version(),
        cpu=look_at_cpu(),
        devices=tuple(devices),
        nvml=nvml,
        nccl=look_for_nccl(),
        cupy=look_for_cupy(),
        transport=look_at_transport(
            devices or [torch.device("cpu")] * 2, _between(devices, nvml), are_peers_known=bool(nvml.peers)
        ),
        reuse=look_at_reuse(),
    )


def look_at_transport(
    devices: Sequence[torch.device], known: Topology | None, *, are_peers_known: bool = True
) -> Transport:
    """What carries calls between ``devices``; ``known`` is what lies between them, where they must not be asked."""

    def way(work: Collective) -> str:
        try:
            choice = choose_transport(devices, known, work)
        except ValueError as error:
            return f"refused: {error}"
        is_sure = are_peers_known or choice.transport != "cupy"
        return f"{choice.transport}: {choice.reason}{'' if is_sure else ', if all are peers, which NVML does not tell'}"

    try:
        settings = current()
    except ValueError as error:
        return Transport("", {"broadcast": f"refused: {error}"})
    named = {"": settings.transport, "route ": settings.route}
    asked = ", ".join(f"{name}{value!r}" for name, value in named.items() if value is not None)
    return Transport(asked, {work: way(work) for work in (_WORK if asked else ("broadcast",))})


def look_at_reuse() -> str:
    """Whether calls use replicas and copies of earlier ones again."""
    why_not = ownership.why_not_trusted()
    if why_not is None:
        return "replicas and copies that nobody else has are used again"
    return f"each call makes its own replicas and copies, because reference counts are not trusted: {why_not}"


def _between(devices: Sequence[torch.device], nvml: Nvml) -> Topology | None:
    """What lies between GPUs as NVML has it, because asking CUDA would initialise it."""
    if not devices or devices[0].type != "cuda":
        return None
    numbers = range(len(devices))
    if not nvml.peers:  # nothing is known: a call asks CUDA
        return Topology(tuple(devices), {(i, j): Link.PEER for i in numbers for j in numbers if i != j})
    reached = {(i, j) for i, row in enumerate(nvml.peers) for j, answer in enumerate(row) if answer.startswith("yes")}
    links = {
        (i, j): Link.PEER if {(i, j), (j, i)} <= reached else Link.HOST for i in numbers for j in numbers if i != j
    }
    return Topology(tuple(devices), links)


def torch_build() -> str:
    """What torch was compiled for."""
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "no CUDA, no HIP"


def look_at_cpu(meminfo: Path = Path("/proc/meminfo")) -> Cpu:
    """Cores and memory of the host."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    if not meminfo.exists():
        return Cpu(cores, usable, f"not shown: this system has no {meminfo}")
    kib = {key: int(value) for key, value in re.findall(r"(\w+): +(\d+) kB", meminfo.read_text())}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    return Cpu(cores, usable, Memory(total, total - free, free))


def look_for_nccl() -> str:
    """The version of the NCCL (on ROCm: RCCL) that torch brings."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "not in this build of torch"
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def look_for_cupy() -> str:
    """The installed CuPy distributions, by their metadata: an import takes seconds and memory, and may fail."""
    found = []
    for name in CUPY_DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(found) > 1:
        return ", ".join(found) + " (they overwrite each other: keep one)"
    if not found and importlib.util.find_spec("cupy") is not None:
        return "installed, without metadata that says its version"
    return found[0] if found else "not installed"


def look_at_nvml(environ: Mapping[str, str] = os.environ) -> Nvml:
    """Ask NVML, if its Python binding is installed."""
    if importlib.util.find_spec("pynvml") is None:
        return Nvml(notes=("not asked: nvidia-ml-py is not installed",))
    return ask_nvml(importlib.import_module("pynvml"), environ)


def ask_nvml(nvml: Any, environ: Mapping[str, str]) -> Nvml:
    """Ask ``nvml``, a module with pynvml's functions; an error of NVML becomes a note."""
    try:
        nvml.nvmlInit()
        try:
            handles = visible_handles(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
            gpus = tuple(Gpu(nvml.nvmlDeviceGetName(h), gpu_memory(nvml, h)) for h in handles)
            peers = tuple(
                tuple("-" if i == j else peer_access(nvml, a, b) for j, b in enumerate(handles))
                for i, a in enumerate(handles)
            )
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return Nvml(notes=(f"failed: {error}",))
    notes = []
    if len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "GPUs of several kinds: CUDA puts the fastest first, NVML goes by the bus, so what is "
            "said of an index may be true of another unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set"
        )
    return Nvml(gpus, peers, tuple(notes))


def visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """NVML's handles of the devices that ``CUDA_VISIBLE_DEVICES=visible`` leaves, in its order.

    The rules are those of the CUDA C++ programming guide, "CUDA environment variables": indices, or
    UUIDs that may be shortened as long as they are unique; the first entry that names no device
    hides those after it; a device named twice leaves none.
    """
    everything = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    if visible is None:
        return [cuda_handle(nvml, handle) for handle in everything]
    by_uuid = {nvml.nvmlDeviceGetUUID(handle): handle for handle in everything}
    chosen: dict[str, Any] = {}
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):
            matches = {entry: nvml.nvmlDeviceGetHandleByUUID(entry)}
        elif entry.startswith("GPU-"):
            matches = {uuid: h for uuid, h in by_uuid.items() if uuid.startswith(entry)}
        else:
            number = re.match(r"\+?\d+", entry)
            index = int(number.group()) if number else len(everything)
            matches = dict(list(by_uuid.items())[index : index + 1])
        if len(matches) != 1:
            break
        if matches.keys() <= chosen.keys():
            return []
        chosen |= matches
    return [h if uuid.startswith("MIG-") else cuda_handle(nvml, h) for uuid, h in chosen.items()]


def cuda_handle(nvml: Any, handle: Any) -> Any:
    """What CUDA uses of a whole GPU: all of it, or the first instance where it is divided (MIG)."""
    try:
        divided, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:
        return handle  # a GPU that cannot be divided
    return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0) if divided else handle


def gpu_memory(nvml: Any, handle: Any) -> Memory | str:
    """Memory of one GPU; some have none of their own and say so with an error."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return f"not shown: NVML says {error}"
    return Memory(info.total, info.used, info.free)


def peer_access(nvml: Any, one: Any, other: Any) -> str:
    """Whether ``one`` can read from and write to the memory of ``other``, by NVML's word alone."""
    try:
        read = nvml.nvmlDeviceGetP2PStatus(one, other, _P2P_READ)
        write = nvml.nvmlDeviceGetP2PStatus(one, other, _P2P_WRITE)
    except nvml.NVMLError as error:
        return f"error: {error}"
    said_read, said_write = (_P2P_STATUS.get(s, f"status {s}") for s in (read, write))
    return said_read if read == write else f"read {said_read}, write {said_write}"


def format_report(report: Report) -> str:
    """The report as lines of text."""
    cpu = report.cpu
    lines = [
        f"dataparallel  {report.version}",
        f"torch         {report.torch_version} ({report.torch_build}), Python {report.python}",
        f"CPU           {cpu.cores} cores, {cpu.usable} for this process; {_memory(cpu.memory)}",
        *_device_lines(report),
        *(f"NVML          {note}" for note in report.nvml.notes),
        f"NCCL          {report.nccl}",
        f"CuPy          {report.cupy}",
        *_transport_lines(report.transport),
        f"reuse         {report.reuse}",
    ]
    return "\n".join(lines)


def _transport_lines(transport: Transport) -> list[str]:
    if len({*transport.ways.values()}) == 1:
        return [f"transport     {way}" for way in {*transport.ways.values()}]
    return [
        f"transport     {transport.asked} is asked for; calls between these devices go by",
        *(f"  {work:<12}{way}" for work, way in transport.ways.items()),
    ]


def _device_lines(report: Report) -> list[str]:
    devices, gpus = report.devices, report.nvml.gpus
    if not devices:
        lines = ['accelerator   none; device_ids=["cpu", "cpu"] makes CPU slots']
        if gpus:
            names = ", ".join(gpu.name for gpu in gpus)
            lines.append(f"              NVML lists {names}, but this torch does not see any")
        return lines
    kind = devices[0].type
    lines = [f"accelerator   {kind}, {_count(len(devices), 'device')}"]
    if kind != "cuda" or report.torch_build.startswith("HIP"):
        return [*lines, "              memory not shown: asking would make a context"]
    if len(gpus) != len(devices):
        listed = _count(len(gpus), "GPU")
        return [*lines, f"              names and memory not shown: NVML lists {listed}"]
    for device, gpu in zip(devices, gpus, strict=True):
        lines.append(f"  {device!s:<12}{gpu.name}, {_memory(gpu.memory)}")
    return lines + _peer_lines(devices, report.nvml.peers)


def _peer_lines(devices: tuple[torch.device, ...], peers: tuple[tuple[str, ...], ...]) -> list[str]:
    if len(devices) < 2:
        return ["peer access   one device has no peers"]
    rows = [["", *map(str, devices)]]
    rows += [[str(device), *row] for device, row in zip(devices, peers, strict=True)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "peer access   of the row to the column, as NVML has it (nobody has checked the data)",
        *("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]


def _memory(memory: Memory | str) -> str:
    if isinstance(memory, str):
        return f"memory {memory}"
    total, used, free = (f"{n / 2**30:.1f} GiB" for n in (memory.total, memory.used, memory.free))
    return f"memory {total}, {used} used, {free} free"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
