"""A machine is one process with its devices: one rank of a process group of ``torch.distributed``, which only this room
knows.

``group`` has the ranks and what they know of each other's failures, ``lanes`` the sequences of collectives that all
ranks issue in one order, by one thread, and ``collectives`` the collectives themselves. ``start`` compares what ranks
begin with, and gives rank 0's values to all; ``peer_rounds`` is for collectives of replicas. The room knows no modules
and no gradients.
"""
