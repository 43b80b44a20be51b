"""Several machines: one process for each, over a process group of ``torch.distributed``, which only this room knows.

It knows no modules and no gradients. ``sharded.units``, ``gradients`` and ``forms`` call it where a group or a mesh was
given.
"""
