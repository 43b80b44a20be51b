"""Ends the whole run, with every thread's traceback, where a test hangs."""

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest

SECONDS = 120.0

_stderr_key = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"watchdog(seconds): end a run that hangs (default: {SECONDS:g} s)")
    # Capturing is suspended while plugins are configured, so this is the terminal's stderr.
    config.stash[_stderr_key] = os.dup(sys.__stderr__.fileno())


def pytest_unconfigure(config: pytest.Config) -> None:
    if _stderr_key in config.stash:
        os.close(config.stash[_stderr_key])
        del config.stash[_stderr_key]


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest, company: None) -> Iterator[None]:
    """Begins once the test has the processors that it asks for: see `company`."""
    marker = request.node.get_closest_marker("watchdog")
    seconds = marker.args[0] if marker is not None else SECONDS
    faulthandler.dump_traceback_later(seconds, exit=True, file=request.config.stash[_stderr_key])
    yield
    faulthandler.cancel_dump_traceback_later()
