"""Keeps torch's checkpointing from changing the CPU random generator in a backward pass over several accelerators.

torch's checkpointing saves, sets and restores the CPU generator around each recomputation. On distinct accelerators
several engine threads do so at the same time, and the last one may restore a state that another one has set. Then
shuffles and seeds repeat. On one device each recomputation leaves the generator as it found it.
`restore_after_backward` does the same for a whole pass. ``functions.Gather`` calls it: its backward comes first.
"""

from __future__ import annotations

import sys
import threading
from collections import deque

import torch

from dataparallel import _torch

__all__ = ["restore_after_backward"]

# Engine numbers of running passes. Long enough for all that run at a time; a pass that fails leaves its number behind.
_guarded: deque[int] = deque(maxlen=64)
_lock = threading.Lock()


def restore_after_backward() -> None:
    """Restores the CPU generator's state of now when the running backward pass ends.

    Called in a node's backward. Draws that the user's hooks make in the same pass are undone too.
    """
    if "torch.utils.checkpoint" not in sys.modules:
        return
    number = _torch.current_graph_task_id()
    with _lock:
        # The first call in a pass sees the generator before any recomputation; later calls may not.
        if number in _guarded:
            return
        _guarded.append(number)
    state = torch.get_rng_state()
    _torch.queue_callback(lambda: torch.set_rng_state(state))
