"""A test marked `alone` runs while no other process runs a test.

Such processes are those of pytest-xdist, and those that `kinds` starts for several kinds of devices, which say in the
variable `ROOM` where they meet.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOM = "DATAPARALLEL_TESTS_ROOM"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: no test of another process runs at the same time")


@pytest.fixture(autouse=True)
def company(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Holds the lock that all tests share, or that a test marked `alone` has to itself."""
    if ROOM in os.environ:
        folder = Path(os.environ[ROOM])
    elif "PYTEST_XDIST_WORKER" in os.environ:
        folder = tmp_path_factory.getbasetemp().parent
    else:
        yield
        return
    import fcntl

    mode = fcntl.LOCK_SH if request.node.get_closest_marker("alone") is None else fcntl.LOCK_EX
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)  # nobody enters while somebody waits until the room is empty
        fcntl.flock(room, mode)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
