"""``torch.sim``: what ``torch.cuda`` is for CUDA, for the simulated devices. `simulate` registers it with torch.

The functions mean what their namesakes in ``torch.cuda`` mean; without a device they are about the current one. Only
simulated devices have these: `has_context`, `set_memory_capacity`, `counted`, `timeline`, `clocks` and
`check_clocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nogpu.shared import Device
from nogpu.simulated import extension
from nogpu.simulated.extension import index_of
from nogpu.simulated.watching import check_clocks as check_clocks
from nogpu.simulated.watching import clocks as clocks
from nogpu.simulated.watching import counted as counted
from nogpu.simulated.watching import timeline as timeline

Stream = torch.Stream
Event = torch.Event

copies_cannot_fail = True  # the check of copies between devices asks this, and leaves these devices out
_initialized = True  # torch.utils.checkpoint asks this before it keeps the state of the generators


# Devices


def is_available() -> bool:
    return device_count() > 0


def init() -> None:
    """Does nothing: `simulate` has done everything."""


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """Does nothing. torch calls it before the first use of a device."""


def _is_in_bad_fork() -> bool:
    """Returns False: a fork breaks nothing here. That a forked child runs no backward is torch's own rule."""
    return False


def device_count() -> int:
    return extension.C.device_count()


def current_device() -> int:
    return extension.C.current_device()


def set_device(device: Device) -> None:
    """Makes the device current; -1 changes nothing."""
    if device != -1:
        extension.C.set_device(index_of(device))


class device:
    """Makes the device current inside; ``None`` or -1 changes nothing."""

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None or device == -1 else index_of(device)
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(current_device())
        set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        extension.C.go_back_to(self._before.pop())


def has_context(device: Device = None) -> bool:
    """Returns True if this process has used the device, or has made it current in place of another one.

    A CUDA device then has a context until the process ends, which takes hundreds of megabytes. What the first call of
    `simulate` does on the devices does not count.
    """
    return bool(extension.C.has_context(index_of(device)))


class device_of(device):
    """Makes the device of a tensor or storage current inside; a tensor that is elsewhere changes nothing."""

    def __init__(self, obj: torch.Tensor | torch.UntypedStorage) -> None:
        super().__init__(obj.device if obj.device.type == "sim" else None)


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Returns (0, 0), the capability of no CUDA device."""
    index_of(device)
    return 0, 0


def get_device_name(device: Device = None) -> str:
    return f"simulated device {index_of(device)}"


@dataclass(frozen=True)
class DeviceProperties:
    """A simulated device; ``total_memory`` is its capacity in bytes, 0 if none is set."""

    name: str
    total_memory: int
    multi_processor_count: int = 1


def get_device_properties(device: Device = None) -> DeviceProperties:
    _, _, capacity = extension.C.memory_stats(index_of(device))
    return DeviceProperties(get_device_name(device), capacity or 0)


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Returns True for two different devices: all simulated devices reach each other."""
    return index_of(device) != index_of(peer_device)


# Streams


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: Device = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=current_stream().device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes the stream current on its device, and leaves the current device. ``None`` changes nothing."""
    if stream is None:
        return
    before = current_device()
    torch.accelerator.set_stream(stream)
    extension.C.go_back_to(before)


class StreamContext:
    """Makes the stream and its device current inside; ``None`` changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[int, torch.Stream]] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before.append((current_device(), current_stream(self.stream.device)))
            torch.accelerator.set_stream(self.stream)
            extension.C.set_device(self.stream.device.index)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            device, stream = self._before.pop()
            torch.accelerator.set_stream(stream)
            extension.C.go_back_to(device)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


def is_current_stream_capturing() -> bool:
    """Returns False: simulated devices have no graphs to capture."""
    return False


def synchronize(device: Device = None) -> None:
    """Lets the calling thread wait for every stream of the device."""
    torch.accelerator.synchronize(index_of(device))


# Memory, in bytes


def memory_allocated(device: Device = None) -> int:
    return extension.C.memory_stats(index_of(device))[0]


def max_memory_allocated(device: Device = None) -> int:
    return extension.C.memory_stats(index_of(device))[1]


def reset_peak_memory_stats(device: Device = None) -> None:
    extension.C.reset_peak(index_of(device))


# No memory is reserved beyond what is allocated.
memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated
reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Does nothing: no statistics are accumulated."""
    index_of(device)


def memory_stats(device: Device = None) -> dict[str, int]:
    allocated, peak, _ = extension.C.memory_stats(index_of(device))
    kinds = ("allocated", "reserved", "active", "requested")
    current = {f"{kind}_bytes.all.current": allocated for kind in kinds}
    return current | {f"{kind}_bytes.all.peak": peak for kind in kinds}


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    allocated, peak, capacity = extension.C.memory_stats(index_of(device))
    limit = "no capacity set" if capacity is None else f"capacity {capacity:,} bytes"
    return f"sim:{index_of(device)}: {allocated:,} bytes allocated, at most {peak:,} so far, {limit}"


def empty_cache() -> None:
    """Frees nothing, because no memory is cached.

    Raises:
        RuntimeError: ``freed too early: ...`` if a GPU's allocator could end memory here that a stream of another
            device still uses, for all that the calling thread has waited for.
    """
    extension.C.allocators_let_go()


def ipc_collect() -> None:
    """Does nothing: no memory is shared with other processes."""


def set_memory_capacity(capacity: int | None, device: Device = None) -> None:
    """Limits the memory of a device: beyond it an allocation raises ``torch.OutOfMemoryError``.

    Args:
        capacity: in bytes; memory that is already allocated counts. ``None`` removes the limit.
        device: the current device if ``None``.
    """
    if capacity is not None and not isinstance(capacity, int):
        raise TypeError(f"a capacity is a number of bytes, an int, or None; got {type(capacity).__name__}")
    if capacity is not None and capacity < 0:
        raise ValueError(f"a capacity is a number of bytes or None; got {capacity}")
    extension.C.set_capacity(index_of(device), capacity)


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Returns the free bytes and the capacity. Raises ``RuntimeError`` if no capacity is set."""
    allocated, _, capacity = extension.C.memory_stats(index_of(device))
    if capacity is None:
        raise RuntimeError(f"sim:{index_of(device)} has no capacity: set one with torch.sim.set_memory_capacity")
    return max(capacity - allocated, 0), capacity


# A kernel that reads the memory of peers


def launch_rows(
    name: str, rows: torch.Tensor, tensors: Sequence[torch.Tensor | None], shifts: Sequence[int] | None = None
) -> None:
    """Launches a kernel that copies or adds stretches of memory of several devices, as one operator.

    It runs on the current stream of the targets' device, and orders no other stream. The terms of a sum are added in
    their order, those of 16-bit floats in 32 bits.

    Args:
        name: of the kernel, for errors and timelines.
        rows: an int64 matrix on the CPU. A row has the number of its target among the tensors, the first element there
            and how many follow each other; then for each term its tensor's number and its first element.
        tensors: all targets are on one device. A term whose tensor is ``None`` is left out, and a row without terms
            stays as it is.
        shifts: for each tensor, how many elements after its first one the element lies that rows call 0.
    """
    extension.C.launch_rows(name, rows, [*tensors], [] if shifts is None else [*shifts])


# Random numbers: each device has a generator, and a seed gives the same numbers on every device and on the CPU.


def _generator(device: Device) -> torch.Generator:
    return extension.C.default_generator(index_of(device))


def get_rng_state(device: Device = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def seed() -> None:
    _generator(None).seed()


def seed_all() -> None:
    manual_seed_all(torch.initial_seed() if device_count() == 0 else _generator(0).seed())


def initial_seed() -> int:
    return _generator(None).initial_seed()


# Autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True
