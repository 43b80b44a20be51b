"""A public path, with the names that users import from it; ``batches.scatter_gather`` has the code."""

from dataparallel.batches.scatter_gather import gather, scatter, scatter_kwargs
from dataparallel.batches.structures import whole

__all__ = ["gather", "scatter", "scatter_kwargs", "whole"]
