"""Tensors whose parts lie on several devices of this process, and the operators that work on them."""

from dataparallel.sharded import optimizer_state  # this divides what optimizers load
from dataparallel.sharded.distribute import distribute_tensor
from dataparallel.sharded.operators import (  # these fill the table of operators
    copies,
    factories,
    list_reductions,
    lists,
    pointwise,
    questions,
    random,
    reductions,
)
from dataparallel.sharded.placements import Replicate, Shard
from dataparallel.sharded.tensor import ShardedTensor

__all__ = [
    "Replicate",
    "Shard",
    "ShardedTensor",
    "copies",
    "distribute_tensor",
    "factories",
    "list_reductions",
    "lists",
    "optimizer_state",
    "pointwise",
    "questions",
    "random",
    "reductions",
]
