"""Replicas that talk to each other while they are inside ``forward``: collectives, differentiable, in slot order.

Users call these functions in their modules; ``dataparallel.nn`` does too. Outside of a parallel forward there is one
replica, and each collective returns what one replica gets, so a module with collectives works unwrapped.
"""

from dataparallel.peers.identity import count, index

__all__ = ["count", "index"]
