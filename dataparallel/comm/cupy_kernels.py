"""The kernels of the cupy transport, launched: many tensors copied, or summed over slots, in one launch.

Not run on a GPU: what the kernels and their tables do is checked on the CPU, the launches here are not. This room
compiles ``kernels.cu`` with CuPy and launches it on torch's current streams. It neither picks the transport nor makes
memory reachable: a kernel runs on one device and reads and writes that of others, so peer access has to be enabled
(through torch, whose allocator knows what to map) and checked before. Only ``comm`` calls it.

CuPy's current device is per thread, and is set around each launch, which names its stream. All memory comes from torch.
Autograd does not see the writes: destinations are new, or their version counters are the caller's business.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataparallel.comm.kernel_tables import THREADS, Plan, plan_copies, plan_sums

_SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("--std=c++17",)
"""What the kernels are compiled with: no fast-math, since subnormals count."""

_BLOCKS_PER_MULTIPROCESSOR = 8


class _LaunchStream(NamedTuple):
    """All that a launch asks of a stream.

    CuPy's ``ExternalStream`` is deprecated from CuPy 14 on, and before that there is nothing else.
    """

    ptr: int


# Tables whose launches may not have run yet, each with the event that tells.
_held: list[tuple[torch.cuda.Event, list[Tensor]]] = []
_held_lock = threading.Lock()


def why_not() -> str | None:
    """Why the kernels cannot be launched here, in words; ``None`` if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "torch is built for ROCm, where the kernels are not tried"
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        return f"cupy cannot be imported ({error})"
    return None


def copy_many(sources: Sequence[Tensor], destinations: Sequence[Sequence[Tensor]]) -> list[int]:
    """Copies each source into the tensor at its position in every list of ``destinations``, in one launch.

    It runs on the current stream of the sources' device. What was launched before on the current streams of the other
    devices comes before the copies, what is launched there later comes after them.

    Args:
        sources: tensors on one CUDA device.
        destinations: lists as long as ``sources``, each on one CUDA device; shapes and dtypes as in ``sources``.

    Returns:
        The positions that were not copied, since a flat copy does not express them: they must travel another way.

    Raises:
        ValueError: lists that do not match, or tensors of one list on several devices or not on CUDA.
    """
    if not sources:
        return plan_copies(sources, destinations, max_blocks=1).left
    device = _device_of(sources, "sources")
    others = [_device_of(row, f"destinations[{number}]") for number, row in enumerate(destinations) if row]
    plan = plan_copies(sources, destinations, max_blocks=_max_blocks(device))
    _launch(plan, device, others)
    return plan.left


def sum_many(slots: Sequence[Sequence[Tensor]], out: Sequence[Tensor]) -> list[int]:
    """Sums the tensors of all slots, in slot order, into those of ``out``: one launch per dtype.

    It runs on the current stream of the device of ``out``, ordered against the slots' devices as `copy_many` is.
    16-bit floats are summed in ``float32`` and rounded once.

    Args:
        slots: at least one list, as long as ``out``, each on one CUDA device; shapes and dtypes as in ``out``.
        out: tensors on one CUDA device: memory of their own, or a slot's tensors.

    Returns:
        The positions that were not summed, since these kernels do not express them: they must travel another way.

    Raises:
        ValueError: lists that do not match, or tensors of one list on several devices or not on CUDA.
    """
    if not out:
        return plan_sums(slots, out, max_blocks=1).left
    device = _device_of(out, "out")
    others = [_device_of(row, f"slots[{number}]") for number, row in enumerate(slots) if row]
    plan = plan_sums(slots, out, max_blocks=_max_blocks(device))
    _launch(plan, device, others)
    return plan.left


def _launch(plan: Plan, device: torch.device, others: Iterable[torch.device]) -> None:
    if not plan.launches:
        return
    import cupy

    peers = [torch.cuda.current_stream(other) for other in {*others} if other != device]
    stream = torch.cuda.current_stream(device)
    for peer in peers:
        # What is read there must be written, and memory that is written there may still be read by its last owner.
        stream.wait_stream(peer)
    tables = []
    with torch.cuda.device(device), cupy.cuda.Device(device.index):
        for kernel, entries, *arguments, blocks in plan.launches:
            pinned = entries.pin_memory()
            table = pinned.to(device, non_blocking=True)
            tables += [pinned, table]
            # Integers, the pointer among them, are passed as 64 bits.
            _function(kernel, device.index)(
                (blocks,), (THREADS,), (table.data_ptr(), *arguments), stream=_LaunchStream(stream.cuda_stream)
            )
        done = stream.record_event()
    for peer in peers:
        peer.wait_event(done)
    _hold_until(done, tables)


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
    return _module(device_index).get_function(kernel)


@functools.cache
def _module(device_index: int) -> Any:
    import cupy

    return cupy.RawModule(code=_SOURCE.read_text(encoding="utf-8"), options=OPTIONS)


@functools.cache
def _max_blocks(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _BLOCKS_PER_MULTIPROCESSOR


def _device_of(tensors: Sequence[Tensor], name: str) -> torch.device:
    """The CUDA device of all of them: a pointer that a kernel cannot follow would end the process's use of CUDA."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1 or tensors[0].device.type != "cuda":
        raise ValueError(f"{name} must be on one CUDA device; they are on {', '.join(sorted(map(str, devices)))}")
    return tensors[0].device
