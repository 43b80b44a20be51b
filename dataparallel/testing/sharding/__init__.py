"""Operators over all ways to shard their arguments: `ShardingConverter` makes the arguments, `check_op` compares.

Both work on this library's sharded tensors and on torch's DTensors; ``targets`` has what differs between the two.
``converter`` says which placements a tensor can have, ``calls`` runs an operator, ``differences`` compares two results.
The names are for users' tests and for the library's own; the library does not import this package.
"""

from dataparallel.testing.sharding.check import Checked, OperatorDiffers, check_op
from dataparallel.testing.sharding.converter import ShardingConverter

__all__ = ["Checked", "OperatorDiffers", "ShardingConverter", "check_op"]
