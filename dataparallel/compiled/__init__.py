"""Compiled replicas: all replicas of a module on one device call one compiled function.

``torch.compile`` looks at a module when it is called. It lifts the module's parameters and buffers to inputs of the
graph, so a graph that was made for one replica computes with the tensors of any other. ``functions`` makes the function
that replicas call, with a code object of its own for each device, because the compiler keeps graphs with the code.
``gate`` lets one thread compile at a time, and no other thread run compiled code meanwhile. ``recognise`` says which
modules of a tree are compiled, ``calls`` has what a replica calls, and ``counts`` counts what has been compiled.

``modules`` puts the calls into replicas. Nothing here makes replicas, runs them, or moves tensors. Importing this room
does not import the compiler.
"""

from dataparallel.compiled.counts import Counts, counts

__all__ = ["Counts", "counts"]
