"""A machine is one process with its devices: one rank of a process group of ``torch.distributed``, which only this room
knows. The room keeps the collectives of several machines in one order on all ranks, and ends waits when a rank fails.

It knows no modules and no gradients. What is sent: rank 0's values at the start (``start``), averages of gradients
(called by ``gradients.machine_sums`` and ``sharded.units.over_machines``), shards
(``sharded.units.over_machines``), what replicas exchange in ``forward`` (``peer_rounds``), checksums that are compared
(``agreement``), and notices of failures (``health``). ``collectives`` sends all of it but the notices.
"""
