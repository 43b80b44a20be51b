"""`hold`: keeps memory until work of another device that uses it has been done.

To free memory (``torch.cuda.empty_cache``, or an allocator that runs short), CUDA waits for the device that has the
memory, but not for a peer that still reads or writes it, even where a stream of the device waits for that peer (issue
196257 of pytorch). So a stream that waits is not enough: the host has to know that the peer's work is over.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from dataparallel.comm.streams.current import Event
from dataparallel.forks import in_forked_child

_held: list[tuple[Event, Sequence[Tensor]]] = []
_lock = threading.Lock()


def hold(memory: Sequence[Tensor], event: Event) -> None:
    """Keeps ``memory`` until ``event`` has passed, and lets go of what has been held for events that have passed.

    The host does not wait. Memory of other devices than CUDA's is not held.
    """
    global _held
    if not memory or memory[0].device.type != "cuda":
        return
    with _lock:
        # `before` lets go of memory when it goes out of scope, after the lock is released.
        before = [*_held, (event, memory)]
        _held = [each for each in before if not each[0].has_passed()]


@in_forked_child
def forget() -> None:
    """Lets go of all memory. In a forked child a thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _held.clear()
