"""A module tree, read once per call and copied: plan, references, snapshot, cycles, placement, signatures, build.

These files know modules and their attributes. They neither move tensors between devices nor run replicas.
"""
