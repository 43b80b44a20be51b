"""A machine is one process with its devices, a rank of a process group. Only this room knows ``torch.distributed``.

``collectives`` has the collectives themselves, ``group`` what ranks know of each other's failures and the thread that
issues, and ``lanes`` the ranks and the sequences of collectives that all of them issue in one order. ``start`` compares
what ranks begin with, and gives rank 0's values to all; ``peer_rounds`` is for collectives of replicas. The room knows
no modules and no gradients.
"""
