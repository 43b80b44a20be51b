"""The library's second form, without a wrapper: `replicate` changes a module in place, so that it runs on all slots.

This file has the public names and nothing else. Importing it touches no device.
"""

from dataparallel.composable.replicate import ReplicatedModule, register_forward_method, replicate

__all__ = ["ReplicatedModule", "register_forward_method", "replicate"]
