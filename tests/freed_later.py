"""A mark for tests of what ends or is free at once. In a free-threaded Python it may be so later: see the guide."""

import sysconfig

import pytest

freed_later = pytest.mark.xfail(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="without a lock, Python frees what threads of the engine have made when they run Python next",
    strict=False,
)
