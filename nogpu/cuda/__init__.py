"""CUDA without a GPU: torch's CUDA build on a stand-in for CUDA's runtime, for tests of multi-GPU code.

`stand_in` starts it, or ``python -m nogpu.cuda``, which is ``__main__``. ``possible`` says where there
can be one, ``machine`` what the devices are like. ``start`` opens the ``libraries`` that answer in the place of CUDA's,
and loads the ``extension`` that computes operators. ``start`` and ``inherited`` also bring it to the processes that
this one starts. ``watching`` and ``counts`` are what tests ask of it. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nogpu.compiling import SimulationTooLate, SimulationUnavailable, ToolsMissing
from nogpu.cuda import start
from nogpu.cuda.machine import machine_like

if TYPE_CHECKING:
    import torch

    from nogpu.cuda.counts import counted as counted
    from nogpu.cuda.watching import check_clocks as check_clocks
    from nogpu.cuda.watching import clocks as clocks
    from nogpu.cuda.watching import described_kernels as described_kernels
    from nogpu.cuda.watching import late_queries as late_queries
    from nogpu.cuda.watching import set_capacity as set_capacity
    from nogpu.cuda.watching import set_link as set_link
    from nogpu.cuda.watching import skipped_work as skipped_work
    from nogpu.cuda.watching import timeline as timeline

__all__ = [
    "SimulationTooLate",
    "SimulationUnavailable",
    "ToolsMissing",
    "check_clocks",
    "clocks",
    "counted",
    "described_kernels",
    "is_stand_in",
    "late_queries",
    "set_capacity",
    "set_link",
    "skipped_work",
    "stand_in",
    "timeline",
]

_IN_COUNTS = ("counted",)
_IN_WATCHING = (
    "check_clocks",
    "clocks",
    "described_kernels",
    "late_queries",
    "set_capacity",
    "set_link",
    "skipped_work",
    "timeline",
)


def stand_in(devices: int = 8, *, like: str = "a100", hide_gpus: bool = False) -> list[torch.device]:
    """Gives this process CUDA devices on a machine without a GPU, ``cuda:0`` to ``cuda:n-1``, and returns them.

    torch is its CUDA build as installed: allocator, streams, events, pinned memory, peer access and the threads of the
    autograd engine are torch's own. What they ask of CUDA's runtime, of the driver, of NVML and of NCCL is answered by
    libraries of this package. Device memory is host memory, and operators are computed by torch's kernels for the CPU
    on it. A kernel that is not computed raises an error with its name.

    Work is done when it is launched, and vector clocks watch every access. They raise ``RuntimeError`` for what a GPU
    could do wrong, as `nogpu.simulate` describes: ``race: ...`` and ``freed too early: ...``. `check_clocks` at the end
    of a test raises what could not be raised at once, such as an operator of the CPU that reads pinned memory before a
    copy into it is done. `late_queries` lets events answer as late as on a GPU.

    Graphs are captured and launched as on a GPU (``torch.cuda.graph``, ``torch.cuda.make_graphed_callables``). What a
    capture forbids is refused in CUDA's words. At a launch, the clocks see each captured piece of work as if it was
    launched then. What has to be done when it is called cannot be captured, and says so: operators of sparse and
    quantised tensors, collectives of NCCL, CuPy's kernels, functions of the host. Graphs that are made or changed node
    by node, and conditional nodes, are not there.

    What the clocks do not see: what the host does with pinned memory other than by an operator, ``tolist`` or ``numpy``
    (so not what is read later through the array). Waits that CUDA makes by itself hide races in the runs in which they
    happen: ``cudaFree``, which torch's allocator calls where memory runs out and in ``empty_cache``, waits for the
    whole device. It does not wait for other devices, and memory that one of them may still use then is found (``freed
    too early``), whatever the memory's own device waits for. An event that is recorded by ``torch.Event`` right after
    memory with ``record_stream`` was freed is taken for one of the allocator's, so asking it teaches the thread
    nothing. What they report although nothing is wrong: threads that pass work to each other under a lock or with an
    event of ``threading``; a ``queue.Queue``, a ``ThreadPoolExecutor``, start and join are followed.

    Call this before anything imports torch. Or let ``python -m nogpu.cuda SCRIPT`` call it. The first call on a machine
    compiles for some minutes. A later call of the process has to ask for the same devices.

    Processes that this one starts from now on have the same devices if they import the same torch: by ``subprocess``,
    ``multiprocessing`` or ``torchrun``. They learn of them by ``NOGPU_STAND_IN`` and ``PYTHONPATH`` in their
    environment. Take the first one out, and a child sees the machine as it is.

    Args:
        devices: how many, 1 to 64. ``CUDA_VISIBLE_DEVICES`` chooses among them as on a machine with GPUs.
        like: what they say of themselves: "v100", "a100" (40 GB), "a100_80", "h100", "rtx_3090", "titan_rtx" or
            "titan_rtx_pcie". It decides compute capability, memory, multiprocessors, and if they are peers; it does
            not change how fast they are.
        hide_gpus: True hides the GPUs of a machine that has some.

    Raises:
        TypeError: if ``devices`` is not an int.
        ValueError: if there cannot be so many devices, or none like that; if an earlier call has asked for others.
        SimulationUnavailable: a ``RuntimeError`` that says why this process or machine cannot have them, for example
            because it has a GPU. It is `ToolsMissing` if the machine lacks what they are made of: Linux, torch's build
            for CUDA 13, CUDA's headers, a compiler. It is `SimulationTooLate` if torch has been imported.
    """
    wanted, before = machine_like(like, devices), start.machine()
    if before is not None and before != wanted:
        raise ValueError(
            f"this process has {before.devices} devices like {before.like!r} already, which cannot change: ask for the "
            f"same, or use a process of its own; got {devices} like {like!r}"
        )
    start.begin(wanted, hide_gpus)
    import torch

    start.finish()
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def is_stand_in() -> bool:
    """True if the CUDA devices of this process are a stand-in's."""
    return start.machine() is not None


def __getattr__(name: str) -> Any:
    """These import torch, which comes after `stand_in`."""
    if name in _IN_COUNTS:
        from nogpu.cuda import counts

        return getattr(counts, name)
    if name in _IN_WATCHING:
        from nogpu.cuda import watching

        return getattr(watching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
