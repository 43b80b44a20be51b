"""A public path, with the names that users import from it; ``call.parallel_apply`` has the code."""

from dataparallel.call.parallel_apply import parallel_apply

__all__ = ["parallel_apply"]
