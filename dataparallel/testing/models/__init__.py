"""Models for tests.

`features` has one small model for each feature of modules that replicas must reproduce: ``CASES``, ``DROPOUT_CASES``.
`layers` and `transformer` have small models for tests of sharding, with the names that torch's own tests of it use.
`tensor_parallel` divides the transformer among processes.

The models for sharding draw their first weights from a generator of their own (``layers``): one seed gives the same
weights on every slot, thread and process, and the global generator stays as it is.

This file has the public names and nothing else. Importing it touches no device and no other process.
"""

from dataparallel.testing.models.features import CASES, DROPOUT_CASES
from dataparallel.testing.models.layers import MLP, RMSNorm, StackedMLP
from dataparallel.testing.models.transformer import ModelArgs, Transformer

__all__ = ["CASES", "DROPOUT_CASES", "MLP", "ModelArgs", "RMSNorm", "StackedMLP", "Transformer"]
