"""A public path, with the names that users import from it; ``batches.batch_types`` has the code."""

from dataparallel.batches.batch_types import register_batch, register_container

__all__ = ["register_batch", "register_container"]
