"""A public path, with the names that users import from it; ``batches.structures`` has the code."""

from dataparallel.batches.structures import register_batch, register_container

__all__ = ["register_batch", "register_container"]
