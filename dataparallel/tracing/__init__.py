"""`dataparallel.trace`: where the time of a step went.

``recorder`` takes down ranges that other rooms announce to ``dataparallel.profiling``, and ``block`` adds those of
torch. After the block ``results`` makes figures of them, which ``table`` and ``timeline`` show.
"""

from dataparallel.tracing.block import Trace, trace

__all__ = ["Trace", "trace"]
