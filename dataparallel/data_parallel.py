"""A public path, with the names that users import from it; ``forms.data_parallel`` has the code."""

from dataparallel.forms.data_parallel import DataParallel, data_parallel

__all__ = ["DataParallel", "data_parallel"]
