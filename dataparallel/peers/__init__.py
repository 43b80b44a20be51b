"""Replicas that talk to each other while they are inside ``forward``: collectives, differentiable, in slot order.

Users call these functions in their modules; ``dataparallel.nn`` does too. ``identity`` and ``span`` say which replica
runs, ``collectives`` are the functions, ``requests`` what replicas have to agree on. ``joint`` brings the tensors of
all together at a meeting (``threads.meetings``); ``across_machines`` brings them to other machines. ``checkpoint``
keeps on ``tape`` what a recomputation needs.

Outside of a parallel forward there is one replica, and each collective returns what one replica gets, so a module with
collectives works unwrapped.
"""

from dataparallel.peers.checkpoint import checkpoint
from dataparallel.peers.collectives import all_gather, all_reduce, all_to_all, barrier, broadcast, reduce_scatter
from dataparallel.peers.span import count, index
from dataparallel.threads.meetings import set_time_limit

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "checkpoint",
    "count",
    "index",
    "reduce_scatter",
    "set_time_limit",
]
