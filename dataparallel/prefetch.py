"""A public path, with the names that users import from it; ``forms.prefetch`` has the code."""

from dataparallel.forms.prefetch import prefetch

__all__ = ["prefetch"]
