"""Marks for tests that a free-threaded Python may fail: see the guide."""

import sysconfig

import pytest

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

freed_later = pytest.mark.xfail(
    FREE_THREADED,
    reason="without a lock, Python frees what threads of the engine have made when they run Python next",
    strict=False,
)
"""For tests of what ends or is free at once."""

first_call_is_shared = pytest.mark.xfail(
    FREE_THREADED,
    reason="threads that call torch's graph module for the first time at once may write its code at once",
    strict=False,
)
"""For tests of threads that call what another one has just compiled."""
