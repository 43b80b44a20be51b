"""Where the replica stands that runs here, and if its collectives can be computed again. ``span`` says more."""

from __future__ import annotations

import inspect

import torch

from dataparallel import _torch
from dataparallel.peers.tape import recording, replayed_place
from dataparallel.threads.meetings import Place, here

__all__ = ["check_checkpoints", "place_of_caller"]

_TORCHS = "torch.utils.checkpoint"


def place_of_caller() -> Place | None:
    """The place of the replica that runs or is recomputed here; ``None`` if there is only one."""
    place = replayed_place() or here()
    return None if place is None or place.count == 1 else place


def check_checkpoints(place: Place) -> None:
    """Called before a meeting: a checkpoint around it has to be able to recompute.

    A checkpoint around the whole parallel call recomputes the call, with its meetings. So only what has begun since
    ``forward`` did counts: other saved-tensor hooks, or gradients that are off.

    Raises:
        RuntimeError: it is one of torch's, which cannot.
    """
    if recording():
        return
    hooks = _torch.top_saved_tensors_hooks(True)
    others = hooks is not None and hooks != place.meeting.hooks and hooks[0].__module__ == _TORCHS
    reentrant = place.meeting.records and not torch.is_grad_enabled() and _is_called_by(_TORCHS)
    if others or reentrant:
        raise RuntimeError(
            "a collective inside of torch.utils.checkpoint.checkpoint cannot be computed again: that happens in "
            "backward, where no replica can be met; use dataparallel.peers.checkpoint, which keeps what collectives "
            "returned"
        )


def _is_called_by(module: str) -> bool:
    """True if a function of ``module`` is among the callers. Only a reentrant checkpoint leaves no other trace."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
