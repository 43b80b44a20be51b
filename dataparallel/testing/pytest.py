"""A pytest plugin: the fixture `sim_devices`, a list of simulated accelerators.

In the ``conftest.py`` beside your pytest configuration::

    pytest_plugins = ["dataparallel.testing.pytest"]

There are eight devices, or as many as ``sim_devices = 2`` in the ini file or ``--sim-devices=2`` says. They are made
after the collection, before the first test, and only if a test that will run asks for the fixture: other runs compile
nothing and keep their accelerator. From then on they are the accelerators of the process (``torch.accelerator``), so
run tests of CUDA separately.

If the machine lacks a tool to compile them (`ToolsMissing`: no compiler, for example), tests that ask for them are
skipped, and the reason is shown. After any other error these tests fail. If the error is a backward or a use of CUDA at
the import of a ``conftest.py`` or a test file, call `simulate` at the top of ``conftest.py``.

After each test that asks for the devices garbage is collected, so that the next test counts only its own memory. After
each test the clocks are checked, so that memory freed too early fails the test that freed it. Then every device is
waited for, so that memory that the test leaves to be freed later is no error of another test.
"""

from __future__ import annotations

import gc
import unittest
from collections.abc import Generator

import pytest
import torch

from dataparallel.testing.simulated import SimulationTooLate, SimulationUnavailable, ToolsMissing, simulate

__all__ = ["settle", "sim_devices"]

# Exceptions of a test that has not failed.
_NO_FAILURE = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)

_devices_key = pytest.StashKey[list[torch.device] | SimulationUnavailable]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The number of devices, from the command line or the ini file."""
    text = "how many simulated accelerators the fixture sim_devices is a list of"
    parser.addini("sim_devices", f"{text} (default: 8)", default="8")
    parser.addoption("--sim-devices", type=int, metavar="N", help=f"{text} (default: what the ini file says, or 8)")


def pytest_configure(config: pytest.Config) -> None:
    """Ends the run if the number of devices is no number, even if no test asks for devices."""
    _number(config)


@pytest.fixture(scope="session")
def sim_devices(pytestconfig: pytest.Config) -> list[torch.device]:
    """Simulated accelerators, ``sim:0``, ``sim:1``, ..., as many as ``--sim-devices`` or the ini file says.

    A test that asks for them is skipped if the machine lacks a tool (`ToolsMissing`), and fails after any other
    `SimulationUnavailable`.
    """
    devices = _make_once(pytestconfig)
    if isinstance(devices, SimulationTooLate):
        pytest.fail(
            f"{devices}. The fixture sim_devices does so after collection: where a conftest.py or a test file needs "
            "this at import, call dataparallel.testing.simulate at the top of conftest.py",
            pytrace=False,
        )
    if isinstance(devices, ToolsMissing):
        pytest.skip(str(devices))
    if isinstance(devices, SimulationUnavailable):
        pytest.fail(str(devices), pytrace=False)
    return list(devices)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> str | None:
    """Reports the devices of the tests."""
    count = sum(map(_asks, items))
    if count == 0:
        return None
    line = f"simulated accelerators: {_number(config)}, for {count} of {len(items)} tests"
    if torch.cuda.is_available():
        line += "; torch.accelerator means them in this run, so run tests of CUDA in another"
    return line


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Makes the devices before a test can run a backward. If that fails, the fixture reports it in each test."""
    stopped = session.testsfailed and not session.config.option.continue_on_collection_errors
    if session.config.option.collectonly or stopped or not any(map(_asks, session.items)):
        return
    try:
        _make_once(session.config)
    except ValueError as error:
        raise pytest.UsageError(f"--sim-devices or the ini file's sim_devices: {error}") from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Memory that the test frees too early fails the test."""
    return (yield from _settled(item, "call"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Memory that its fixtures free too early is an error of its teardown."""
    return (yield from _settled(item, "teardown"))


def _settled(item: pytest.Item, when: str) -> Generator[None, object, object]:
    try:
        result = yield
    except _NO_FAILURE:
        _settle(item)
        raise
    except BaseException:
        try:
            _settle(item)
        except RuntimeError as freed:  # the first error is the test's
            item.add_report_section(when, "simulated accelerators", str(freed))
        raise
    _settle(item)
    return result


def _settle(item: pytest.Item) -> None:
    if not isinstance(item.config.stash.get(_devices_key, None), list):
        return
    if _asks(item):
        gc.collect()
    settle()


def settle() -> None:
    """At the end of a test: raises if it has freed memory too early, and waits for every device.

    So memory that the test leaves to be freed later is no error of another test.
    """
    try:
        torch.sim.check_clocks()  # type: ignore[attr-defined]
    finally:
        for index in range(torch.sim.device_count()):  # type: ignore[attr-defined]
            torch.sim.synchronize(index)  # type: ignore[attr-defined]


def _make_once(config: pytest.Config) -> list[torch.device] | SimulationUnavailable:
    """The devices, or the error that says why there are none."""
    if _devices_key not in config.stash:
        number = _number(config)
        # A conftest.py that needs devices at import has called `simulate` itself, perhaps for more of them.
        already = torch.sim.device_count() if hasattr(torch, "sim") else 0
        try:
            config.stash[_devices_key] = simulate(max(number, already))[:number]
        except SimulationUnavailable as error:
            config.stash[_devices_key] = error
    return config.stash[_devices_key]


def _number(config: pytest.Config) -> int:
    given: int | None = config.getoption("--sim-devices")
    if given is not None:
        return given
    text = config.getini("sim_devices")
    try:
        return int(text)
    except ValueError as error:
        raise pytest.UsageError(f"the ini file's sim_devices is a number; got {text!r}") from error


def _asks(item: pytest.Item) -> bool:
    return "sim_devices" in getattr(item, "fixturenames", ())
