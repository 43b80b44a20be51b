"""`hold`: keeps memory until work of another device that uses it has been done.

To free memory (``torch.cuda.empty_cache``, or an allocator that runs short), CUDA waits for the device that has the
memory, but not for a peer that still reads or writes it, even where a stream of the device waits for that peer (issue
196257 of pytorch). So a stream that waits is not enough: the host has to know that the peer's work is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from dataparallel.comm.streams.current import Event
from dataparallel.forks import in_forked_child

_held: deque[tuple[Event, Sequence[Tensor]]] = deque()
_lock = threading.Lock()


def hold(memory: Sequence[Tensor], event: Event) -> None:
    """Keeps ``memory`` until ``event`` has passed, and lets go of what is held for earlier events that have passed.

    The host does not wait. It may be far ahead of the devices, so it asks the events in their order until one has not
    passed. Memory of other devices than CUDA's is not held.
    """
    if not memory or memory[0].device.type != "cuda":
        return
    passed = []  # lets go of memory when it goes out of scope, after the lock is released
    with _lock:
        _held.append((event, memory))
        while _held and _held[0][0].has_passed():
            passed.append(_held.popleft())


@in_forked_child
def forget() -> None:
    """Lets go of all memory. In a forked child a thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _held.clear()
