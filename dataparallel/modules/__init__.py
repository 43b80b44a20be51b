"""A module tree, read once per call and copied: plan, references, snapshot, cycles, placement, signatures, build.

These rooms know modules and their attributes. How tensors travel, and who runs a replica, is not their business.
"""
