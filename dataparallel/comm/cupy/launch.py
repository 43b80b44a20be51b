"""The kernels of the cupy transport, launched: many tensors copied, or summed over slots, in one launch.

Not run on a GPU: what the kernels and their tables do is checked on the CPU, the launches here are not. This room
compiles ``kernels.cu`` with CuPy and launches it on torch's current streams. It sees addresses, no tensors, and
picks no transport: a kernel runs on one device and reads and writes the memory of others, which have to be peers. Only
``comm`` calls it. CuPy is imported at the first question whether the kernels can be launched, never before.

CuPy's current device is per thread, and is set around each launch, which names its stream. All memory comes from torch.
Autograd does not see the writes: destinations are new, or their version counters are the caller's business.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataparallel.comm.cupy.tables import THREADS, Kernel, Launch, pack
from dataparallel.forks import in_forked_child

_SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("--std=c++17",)
"""What the kernels are compiled with. CuPy adds ``-ftz=true`` after it, which the kernels have to bear."""

_BLOCKS_PER_MULTIPROCESSOR = 8


class _LaunchStream(NamedTuple):
    """All that a launch asks of a stream.

    CuPy's ``ExternalStream`` is deprecated from CuPy 14 on, and before that there is nothing else.
    """

    ptr: int


# Tables whose launches may not have run yet, each with the event that tells.
_held: list[tuple[torch.cuda.Event, list[Tensor]]] = []
_held_lock = threading.Lock()


# Pairs of devices whose memory torch has mapped for each other.
_reachable: set[frozenset[torch.device]] = set()
_reaching = threading.Lock()


def why_not() -> str | None:
    """Why the kernels cannot be launched here, in words; ``None`` if they can. Imports CuPy."""
    problem = why_not_installed()
    if problem is not None:
        return problem
    try:
        import cupy  # noqa: F401
    except Exception as error:  # what a broken installation raises is anything
        return f"cupy cannot be imported ({type(error).__name__}: {error})"
    return None


def why_not_installed() -> str | None:
    """What is known of `why_not` without an import of CuPy."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "torch is built for ROCm, where the kernels are not tried"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    return None


def launch(
    kernel: Kernel,
    pointers: Sequence[Sequence[int]],
    counts: Sequence[int],
    device: torch.device,
    others: Iterable[torch.device],
) -> None:
    """Launches a kernel on the current stream of ``device``, unless nothing has an element.

    What was launched before on the current streams of the other devices comes before it, what is launched there later
    comes after it. The caller holds the memory until this returns.

    Args:
        kernel: see `kernel_tables.pack`, which says what the kernels demand of ``pointers`` and ``counts`` too.
        pointers: see above; nothing is checked. All memory is on ``device`` or on ``others``.
        counts: see above.
        device: a CUDA device.
        others: CUDA devices, in any order; repeated ones and ``device`` itself count once.

    Raises:
        ValueError: a device that is not on CUDA, rows of different lengths.
        RuntimeError: CuPy cannot compile or launch the kernel.
    """
    others = [*others]
    for place in (device, *others):
        if place.type != "cuda":
            # A pointer that a kernel cannot follow would end the process's use of CUDA.
            raise ValueError(f"the kernels read and write memory of CUDA devices; got {place}")
    _launch(pack(kernel, pointers, counts, max_blocks=_max_blocks(device)), device, others)


def _launch(packed: Launch, device: torch.device, others: Iterable[torch.device]) -> None:
    if packed.blocks == 0:
        return
    import cupy

    others = [other for other in dict.fromkeys(others) if other != device]
    _make_reachable(device, others)
    peers = [torch.cuda.current_stream(other) for other in others]
    stream = torch.cuda.current_stream(device)
    for peer in peers:
        # What is read there must be written, and memory that is written there may still be read by its last owner.
        stream.wait_stream(peer)
    kernel, entries, *arguments, blocks = packed
    with torch.cuda.device(device), cupy.cuda.Device(device.index):
        pinned = entries.pin_memory()
        table = pinned.to(device, non_blocking=True)
        # Integers, the pointer among them, are passed as 64 bits.
        _function(kernel, device.index)(
            (blocks,), (THREADS,), (table.data_ptr(), *arguments), stream=_LaunchStream(stream.cuda_stream)
        )
        done = stream.record_event()
    for peer in peers:
        peer.wait_event(done)
    _hold_until(done, [pinned, table])


def _make_reachable(device: torch.device, others: Sequence[torch.device]) -> None:
    """Has torch map the memory of ``others`` for ``device``, and the reverse; once for each pair.

    torch enables peer access within its own copies only, each copy for the device that it comes from, and a kernel that
    reads what is not mapped ends the process's use of CUDA. The check of peers, which copies too, may be turned off.
    """
    if all(frozenset((device, other)) in _reachable for other in others):
        return
    with _reaching:
        for other in others:
            pair = frozenset((device, other))
            if pair not in _reachable:
                _copy(device, other)
                _copy(other, device)
                _reachable.add(pair)


def _copy(source: torch.device, target: torch.device) -> None:
    """torch's own copy of one byte."""
    torch.empty(1, dtype=torch.uint8, device=target).copy_(torch.empty(1, dtype=torch.uint8, device=source))


def _hold_until(done: torch.cuda.Event, tables: list[Tensor]) -> None:
    """Keeps tables until the event has passed; lets go of those of earlier launches that have run."""
    global _held
    with _held_lock:
        # What is let go is freed with `before`, when the lock is free again.
        before = [*_held, (done, tables)]
        _held = [held for held in before if not held[0].query()]


@functools.cache
def _function(kernel: str, device_index: int) -> Any:
    """The kernel, loaded for the current device, which is the one with this index."""
    try:
        return _module(device_index).get_function(kernel)
    except Exception as error:  # CuPy's own for a compiler that fails, others for one that is not there
        raise RuntimeError(f"CuPy cannot compile the kernels ({type(error).__name__}: {error})") from error


@functools.cache
def _module(device_index: int) -> Any:
    import cupy

    return cupy.RawModule(code=_SOURCE.read_text(encoding="utf-8"), options=OPTIONS)


@functools.cache
def _max_blocks(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _BLOCKS_PER_MULTIPROCESSOR


@in_forked_child
def _forget() -> None:
    """In a forked child: another thread may have held the lock, and what is mapped is mapped in the parent."""
    global _reaching
    _reaching = threading.Lock()
    _reachable.clear()
