"""A public path, with the names that users import from it; ``replicas.replicate`` has the code."""

from dataparallel.replicas.replicate import replicate

__all__ = ["replicate"]
