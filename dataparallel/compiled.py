"""The public path of compiled replicas: how many functions have been compiled, and how often."""

from dataparallel.replicas.compiled.calls import FrameCounts, counts

__all__ = ["FrameCounts", "counts"]
