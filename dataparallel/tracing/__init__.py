"""`dataparallel.trace`: where the time of a step went, by torch's profiler.

``block`` is the block around the profiler, ``rows`` makes figures of its events, and text of these. The ranges
are those of ``dataparallel.profiling``, and what to try is in ``call.advice``.
"""

from dataparallel.tracing.block import Trace, trace

__all__ = ["Trace", "trace"]
