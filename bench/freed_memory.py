"""What becomes of memory that a benchmark frees. Needs nothing else of the benchmarks, nor of the library."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> None:
    """Tells the C library, where it can be told, to keep freed memory, as the allocators of accelerators do.

    Otherwise it gives large blocks back to the system, and the next ones come page by page, which takes longer than
    filling them. Which sizes are affected depends on chance.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not the GNU C library
        return
    trim_threshold, mmap_max = -1, -4  # their numbers in malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)
