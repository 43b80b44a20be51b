"""`dataparallel.trace`: where the time of a step went, by torch's profiler."""

from dataparallel.tracing.block import Trace, trace

__all__ = ["Trace", "trace"]
