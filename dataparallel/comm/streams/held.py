"""`hold` and `hold_for_peers`: keep memory until work of another device that uses it has been done.

To free memory (``torch.cuda.empty_cache``, or an allocator that runs short), CUDA waits for the device that has the
memory, but not for a peer that still reads or writes it, even where a stream of the device waits for that peer (issue
196257 of pytorch). So a stream that waits is not enough: the host has to know that the peer's work is over.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.devices import CPU
from dataparallel.forks import in_forked_child

_held: defaultdict[torch.device, deque[tuple[Event, Sequence[Tensor]]]] = defaultdict(deque)
_lock = threading.Lock()
_together = threading.local()  # ``memory``: what `held_together` collects in this thread


def hold(memory: Sequence[Tensor], event: Event) -> bool:
    """Keeps ``memory`` until ``event`` has passed. The host does not wait.

    Memory of other devices than CUDA's is not held, and the function returns false: then the stream that owns the
    memory has to wait for the event.
    """
    if not memory or memory[0].device.type != "cuda":
        return False
    alias = [*map(Tensor.detach, memory)]  # without a graph, which would be held too
    with _lock:
        held = _held[memory[0].device]
        held.append((event, alias))
        passed = _take_passed(held)
    del passed  # after the lock is released
    return True


def _take_passed(held: deque[tuple[Event, Sequence[Tensor]]]) -> list[Any]:
    passed = []
    while held and held[0][0].has_passed():  # the oldest first, so that few are asked
        passed.append(held.popleft())
    return passed


def let_go_of_passed() -> None:
    """Lets go of what has been held long enough. Otherwise it stays until `hold` is called for the device again.

    A finalizer may call this in a thread that has the lock, in the middle of `hold`: then it does nothing.
    """
    if not _lock.acquire(blocking=False):
        return
    try:
        passed = [_take_passed(held) for held in _held.values()]
    finally:
        _lock.release()
    del passed


def hold_for_peers(memory: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Keeps ``memory`` after copies between its devices and those of ``others``, in either direction.

    The current streams of its devices wait for these copies. Within one device nothing is held.
    """
    is_on_cuda = any(tensor.device.type == "cuda" for tensor in memory)
    if is_on_cuda and len({tensor.device for tensor in (*memory, *others)} - {CPU}) > 1:
        collected: list[Tensor] | None = getattr(_together, "memory", None)
        if collected is None:
            _hold_on_current_streams(memory)
        else:
            collected += memory


def _hold_on_current_streams(memory: Sequence[Tensor]) -> None:
    for device, stream in current_streams({tensor.device for tensor in memory}).items():
        hold([tensor for tensor in memory if tensor.device == device], Event(stream))


@contextmanager
def held_together() -> Iterator[None]:
    """Has `hold_for_peers` keep in the end what it gets meanwhile in this thread, with one event for each device.

    The same streams have to be current in the end.
    """
    if getattr(_together, "memory", None) is not None:
        yield
        return
    memory: list[Tensor] = []
    _together.memory = memory
    try:
        yield
    finally:
        _together.memory = None
        _hold_on_current_streams(memory)


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A thread of the parent may have held the lock.

    What is held stays held: to free it would ask torch's allocator and CUDA, whose locks may have been held too.
    """
    global _lock
    _lock = threading.Lock()
