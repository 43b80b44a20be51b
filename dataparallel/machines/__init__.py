"""A machine is one process with its devices: one rank of a process group of ``torch.distributed``, which only this room
knows. The room keeps the collectives of several machines in one order on all ranks, and ends waits when a rank fails.

It knows no modules and no gradients. ``sharded.units``, ``gradients`` and ``forms`` call it for a group or a mesh.
"""
