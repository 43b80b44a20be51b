"""A public path, with the names that users import from it; ``batches`` has the code."""

from dataparallel.batches.gather import gather
from dataparallel.batches.scatter import scatter, scatter_kwargs
from dataparallel.batches.structures import whole

__all__ = ["gather", "scatter", "scatter_kwargs", "whole"]
