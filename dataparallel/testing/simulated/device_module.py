"""``torch.sim``: for the simulated devices what ``torch.cuda`` is for CUDA. `simulate` registers it with torch.

The functions mean what their namesakes in ``torch.cuda`` mean; without a device they are about the current one. What
only simulated devices have: `has_context`, `set_memory_capacity`, the counts in `counted`, and the clocks in `clocks`
and `check_clocks`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dataparallel.testing.simulated.counts import Counts, Device

Stream = torch.Stream
Event = torch.Event

copies_cannot_fail = True  # whoever checks copies between devices before trusting them need not
_initialized = True  # torch.utils.checkpoint asks before it keeps the generators' states
_C: Any = None  # the compiled extension, set by `simulate` before torch knows of this module


def _index(device: Device) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "sim":
            raise ValueError(f"torch.sim is about simulated devices; got {device}")
        device = device.index
    index, count = current_device() if device is None else device, device_count()
    if not 0 <= index < count:
        raise ValueError(f"sim:{index}: this process simulates {count} devices, sim:0 to sim:{count - 1}")
    return index


# Devices


def is_available() -> bool:
    return device_count() > 0


def init() -> None:
    """Nothing is left to do."""


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """torch calls it before the first use of a device."""


def _is_in_bad_fork() -> bool:
    """Never: there is nothing that a fork would break, but torch's own rule about backward in a forked child."""
    return False


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device: Device) -> None:
    """-1 changes nothing."""
    if device != -1:
        _C.set_device(_index(device))


class device:
    """The device is current inside; ``None`` or -1 changes nothing."""

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None or device == -1 else _index(device)
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(current_device())
        set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _C.go_back_to(self._before.pop())


def has_context(device: Device = None) -> bool:
    """Whether this process has used the device, or made it current in place of another one.

    A CUDA device has a context from then on, until the process ends, and it takes hundreds of megabytes. What torch
    does when `simulate` is called first does not count.
    """
    return bool(_C.has_context(_index(device)))


class device_of(device):
    """The device of a tensor or storage is current inside; one that is elsewhere changes nothing."""

    def __init__(self, obj: torch.Tensor | torch.UntypedStorage) -> None:
        super().__init__(obj.device if obj.device.type == "sim" else None)


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Of no generation: (0, 0)."""
    _index(device)
    return 0, 0


def get_device_name(device: Device = None) -> str:
    return f"simulated device {_index(device)}"


@dataclass(frozen=True)
class DeviceProperties:
    """What is known of a simulated device; ``total_memory`` in bytes is 0 where no capacity has been set."""

    name: str
    total_memory: int
    multi_processor_count: int = 1


def get_device_properties(device: Device = None) -> DeviceProperties:
    _, _, capacity = _C.memory_stats(_index(device))
    return DeviceProperties(get_device_name(device), capacity or 0)


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Whether the two are different devices: all of them reach each other."""
    return _index(device) != _index(peer_device)


# Streams


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=current_stream().device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes the stream current on its device. The current device stays. ``None`` changes nothing."""
    if stream is None:
        return
    before = current_device()
    torch.accelerator.set_stream(stream)
    _C.go_back_to(before)


class StreamContext:
    """The stream and its device are current inside; ``None`` changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[int, torch.Stream]] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before.append((current_device(), current_stream(self.stream.device)))
            torch.accelerator.set_stream(self.stream)
            _C.set_device(self.stream.device.index)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            device, stream = self._before.pop()
            torch.accelerator.set_stream(stream)
            _C.go_back_to(device)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


def is_current_stream_capturing() -> bool:
    """Never: there are no graphs to capture."""
    return False


def synchronize(device: Device = None) -> None:
    """The calling thread has waited for every stream of the device."""
    torch.accelerator.synchronize(_index(device))


# Memory, in bytes


def memory_allocated(device: Device = None) -> int:
    return _C.memory_stats(_index(device))[0]


def max_memory_allocated(device: Device = None) -> int:
    return _C.memory_stats(_index(device))[1]


def reset_peak_memory_stats(device: Device = None) -> None:
    _C.reset_peak(_index(device))


# Nothing is reserved but what is allocated, and nothing is counted but bytes.
memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated
reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Nothing is accumulated."""
    _index(device)


def memory_stats(device: Device = None) -> dict[str, int]:
    allocated, peak, _ = _C.memory_stats(_index(device))
    kinds = ("allocated", "reserved", "active", "requested")
    current = {f"{kind}_bytes.all.current": allocated for kind in kinds}
    return current | {f"{kind}_bytes.all.peak": peak for kind in kinds}


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    allocated, peak, capacity = _C.memory_stats(_index(device))
    limit = "no capacity set" if capacity is None else f"capacity {capacity:,} bytes"
    return f"sim:{_index(device)}: {allocated:,} bytes allocated, at most {peak:,} so far, {limit}"


def empty_cache() -> None:
    """Nothing is cached."""


def ipc_collect() -> None:
    """Nothing is shared with other processes."""


def set_memory_capacity(capacity: int | None, device: Device = None) -> None:
    """From now on, what would make the device hold more bytes raises ``torch.OutOfMemoryError``; ``None``: no limit."""
    if capacity is not None and not isinstance(capacity, int):
        raise TypeError(f"a capacity is a number of bytes, an int, or None; got {type(capacity).__name__}")
    if capacity is not None and capacity < 0:
        raise ValueError(f"a capacity is a number of bytes or None; got {capacity}")
    _C.set_capacity(_index(device), capacity)


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free bytes and capacity. Raises ``RuntimeError`` where no capacity has been set."""
    allocated, _, capacity = _C.memory_stats(_index(device))
    if capacity is None:
        raise RuntimeError(f"sim:{_index(device)} has no capacity: set one with torch.sim.set_memory_capacity")
    return max(capacity - allocated, 0), capacity


# Counts


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts launches and copied bytes of the whole process, all threads, while inside.

    Blocks may be nested, and several threads may be inside: each counts everything that happens.

    A launch is an operator that read or wrote elements on a device and did not raise: one, whatever the number of its
    tensors. So ``cat`` is one, and so are the ``torch._foreach_*`` operators for lists that lie on one device, as the
    fused kernels of CUDA are few; lists on several devices are launched one tensor at a time. What torch itself takes
    apart counts by its parts: ``clone`` is a copy, ``ones`` a fill, dropout and recurrent cells are several operators.

    A copy is one launch, whatever the layouts and dtypes, of the device on whose stream it is launched: of the source,
    where that is a device. ``item`` is one, and so is enlarging memory that has elements (``resize_``). None are
    allocations, views, what only asks for or changes a shape, and operators on tensors without elements.

    Bytes are those of a copy's target (elements times item size), as torch converts and packs before it sends; of
    ``item``, one element. What an operator takes from a CPU tensor by itself (numbers, indices) does not count, nor do
    bytes that torch.distributed moves.

    Yields:
        ``counts.launches``: for each device a number. ``counts.copied``: for each pair of devices between which
        something was copied, ``(from, to)`` with -1 for the host, the bytes; 0 for other pairs.
        ``counts.sent(device)`` and ``counts.received(device)``: bytes to and from all other devices, without the host.
        Read inside, they say what has been counted so far; afterwards they stay.
    """
    counts = Counts(_C, _index)
    try:
        yield counts
    finally:
        counts._stop()


# Random numbers: one generator per device; the same seed gives the same numbers on each of them and on the CPU.


def _generator(device: Device) -> torch.Generator:
    return _C.default_generator(_index(device))


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


# Clocks


_wishes: list[list[Any]] = []  # of the blocks of `clocks` that are open: the name of a switch, and its setting
_switching = threading.Lock()


@contextmanager
def clocks(enabled: bool = True, *, stacks: bool | None = None) -> Iterator[None]:
    """Switches, for all threads while inside, whether accesses that nothing orders raise; see `simulate`.

    Where several threads are inside such blocks, the one that entered last decides.

    Args:
        enabled: whether the clocks run. Memory that was in use while they were off has gaps in its history.
        stacks: whether each access remembers its Python stack, for the message of a later race. Slow. ``None``: as
            it is.
    """
    asked = [("clocks", enabled)] + ([] if stacks is None else [("stacks", stacks)])
    # Lists, because two blocks may ask for the same.
    mine = [list(wish) for wish in asked]
    _switch(lambda: _wishes.extend(mine))
    try:
        yield
    finally:
        _switch(lambda: _forget(mine))


def _forget(mine: list[list[Any]]) -> None:
    _wishes[:] = [wish for wish in _wishes if not any(wish is one for one in mine)]


def _switch(change: Callable[[], object]) -> None:
    with _switching:
        change()
        now = {"clocks": True, "stacks": False} | {name: value for name, value in _wishes}
        _C.enable_clocks(now["clocks"])
        _C.keep_stacks(now["stacks"])


def check_clocks() -> None:
    """Raises ``RuntimeError`` for memory freed while a stream may use it that the calling thread has not waited for.

    Using such memory again raises by itself; this is for the end of a test. It names the first, and forgets all.
    """
    _C.check()
