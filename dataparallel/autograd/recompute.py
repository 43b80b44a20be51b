"""What torch's checkpoints need in a backward over several slots: one recomputation, the CPU generator as it was.

Nodes that join the outputs of slots call it, because their backward comes first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.pass_of_backward import running_pass
from dataparallel.comm.streams.current import run_apart


def restore_after_backward() -> None:
    """Restores the CPU generator's state of now when the running backward pass ends.

    torch's checkpoints save, set and restore it around each recomputation. On distinct accelerators several threads of
    the engine do so at the same time, and the last one may restore what another one has set: shuffles and seeds repeat.
    Called in a node's backward. Draws that the user's hooks make in the same pass are undone too.
    """
    if "torch.utils.checkpoint" not in sys.modules:
        return
    running = running_pass()
    # The first call in a pass sees the generator before any recomputation; later calls may not.
    if running.is_first(restore_after_backward):
        state = torch.get_rng_state()
        running.on_end(lambda ok: torch.set_rng_state(state) if ok else None)


def note_whether_to_recompute(ctx: Any, slots: Sequence[torch.device], output: Tensor) -> None:
    """In the forward of a node that joins the outputs of ``slots``, for `recompute_here`."""
    ctx.is_unpacked_here = run_apart(slots) and _torch.top_saved_tensors_hooks(True) is not None
    if ctx.is_unpacked_here:
        ctx.save_for_backward(output.new_empty(0))


def recompute_here(ctx: Any, slots: Sequence[torch.device]) -> None:
    """In the backward of such a node, before the replicas' nodes run.

    A checkpoint around the wrapper then recomputes here, once. Otherwise the replicas' nodes would make the engine's
    threads of all devices recompute the same region.
    """
    if ctx.is_unpacked_here:
        _ = ctx.saved_tensors
    if run_apart(slots):
        restore_after_backward()
