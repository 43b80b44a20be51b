"""The order in which autograd's engine runs nodes that are ready at the same time.

The engine runs the ready node with the highest sequence number first. Numbers fall from the last layer to the first,
and only ``AccumulateGrad`` has a higher number than `run_first` sets. ``functions`` and ``bucket_nodes`` call this room
when they make nodes.
"""

from __future__ import annotations

from typing import Any

from dataparallel import _torch

__all__ = ["run_before_last", "run_first", "run_last"]


def run_first(node: Any) -> None:
    """Makes the engine run the node as soon as its gradients have arrived, before other nodes that are ready."""
    _torch.set_sequence_nr(node, 2**62)


def run_last(node: Any) -> None:
    """Makes the engine's thread of the node's device run all other ready nodes first.

    So a backward that computes on the device runs to its end before the node: each of its nodes makes the next ready.
    """
    _torch.set_sequence_nr(node, 0)


def run_before_last(node: Any) -> None:
    """As `run_last`, but before the nodes for which that was called."""
    _torch.set_sequence_nr(node, 1)
