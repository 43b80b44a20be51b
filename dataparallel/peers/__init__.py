"""Replicas that talk to each other while they are inside ``forward``: collectives, differentiable, in slot order.

Outside of a parallel forward there is one replica, and each collective returns what one replica gets, so a module with
collectives works unwrapped.
"""

from dataparallel.peers.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from dataparallel.peers.joint import checkpoint, count, index
from dataparallel.threads.meetings import set_time_limit

__all__ = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "checkpoint",
    "count",
    "index",
    "reduce_scatter",
    "set_time_limit",
]
