"""Keeps torch's checkpointing from changing the CPU random generator in a backward pass over several accelerators.

torch's checkpointing saves, sets and restores the CPU generator around each recomputation. On distinct accelerators
several engine threads do so at the same time, and the last one may restore a state that another one has set. Then
shuffles and seeds repeat. On one device each recomputation leaves the generator as it found it.
`restore_after_backward` does the same for a whole pass. ``functions.Gather`` calls it: its backward comes first.
"""

from __future__ import annotations

import sys

import torch

from dataparallel.autograd.pass_of_backward import running_pass

__all__ = ["restore_after_backward"]


def restore_after_backward() -> None:
    """Restores the CPU generator's state of now when the running backward pass ends.

    Called in a node's backward. Draws that the user's hooks make in the same pass are undone too.
    """
    if "torch.utils.checkpoint" not in sys.modules:
        return
    running = running_pass()
    # The first call in a pass sees the generator before any recomputation; later calls may not.
    if running.is_first(restore_after_backward):
        state = torch.get_rng_state()
        running.on_end(lambda ok: torch.set_rng_state(state) if ok else None)
