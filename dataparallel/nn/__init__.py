"""Modules whose replicas talk to each other inside ``forward``: `SyncBatchNorm`.

``batch_norm`` has its nodes of the graph and their exchange, ``chunks`` what they do with a chunk, ``sync_batch_norm``
the module and its conversion. Users call it, and the wrappers convert models on demand.
"""

from dataparallel.nn.sync_batch_norm import BatchNorm, SyncBatchNorm

__all__ = ["BatchNorm", "SyncBatchNorm"]
