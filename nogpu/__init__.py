"""Devices without hardware: find what a program for several GPUs does wrong on a machine that has none.

`simulate` makes accelerators that are real to torch, and watches every access. ``nogpu.cuda`` runs torch's CUDA build
on a stand-in for CUDA. ``nogpu.timeline`` records what a program launches, and predicts when it would run on a machine
that is described; ``python -m nogpu.predict`` does so for training steps. ``nogpu.pytest`` is a plugin.

`simulated` and `cuda` are front ends of one watcher: ``csrc`` is its C++, `compiling` compiles it, `shared` and
`host_threads` are what both have in common in Python. This package imports no library but torch. Importing it does not
import torch, because a stand-in for CUDA has to be there before torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nogpu.compiling import SimulationTooLate, SimulationUnavailable, ToolsMissing

if TYPE_CHECKING:
    from nogpu.simulated import simulate as simulate

__all__ = ["SimulationTooLate", "SimulationUnavailable", "ToolsMissing", "simulate"]


def __getattr__(name: str) -> Any:
    """`simulate` imports torch."""
    if name == "simulate":
        from nogpu.simulated import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
