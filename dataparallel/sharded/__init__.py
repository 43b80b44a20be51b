"""Tensors whose parts lie on several devices of this process, and the operators that work on them.

Importing it also fills the table of operators, gives the tensors their methods, and adds a hook to optimizers that
divides the states that they load.
"""

from dataparallel.sharded import methods  # noqa: F401
from dataparallel.sharded.distribute import distribute_tensor
from dataparallel.sharded.operators import (  # noqa: F401  each fills a part of the table
    lists,
    new,
    pointwise,
    reductions,
)
from dataparallel.sharded.operators.gathered import allow_gathers
from dataparallel.sharded.placements import Replicate, Shard
from dataparallel.sharded.tensor import ShardedTensor

__all__ = ["Replicate", "Shard", "ShardedTensor", "allow_gathers", "distribute_tensor"]
