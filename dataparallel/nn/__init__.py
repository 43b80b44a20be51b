"""Modules whose replicas talk to each other inside ``forward``: `SyncBatchNorm`."""

from dataparallel.nn.sync_batch_norm import BatchNorm, SyncBatchNorm

__all__ = ["BatchNorm", "SyncBatchNorm"]
