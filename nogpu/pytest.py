"""A pytest plugin: lists of simulated accelerators and of CUDA devices.

In the ``conftest.py`` beside your pytest configuration::

    pytest_plugins = ["nogpu.pytest"]

There are eight devices; ``sim_devices = 2`` in the ini file or ``--sim-devices=2`` makes it two. They are made after
the collection, before the first test, and only if a test that will run asks for the fixture. A run without such tests
compiles nothing and keeps its accelerator. Once made, the devices are the accelerators of the process
(``torch.accelerator``), so run tests of CUDA in another process.

If the machine lacks what compiling needs (`ToolsMissing`, for example no compiler), tests that ask for the fixture are
skipped and the reason is shown. If the devices cannot be made for any other reason, these tests fail. If the reason is
a backward or a use of CUDA while a ``conftest.py`` or a test file is imported, call `simulate` at the top of
``conftest.py``.

After each test that asks for the devices, garbage is collected, so that the next test counts its own memory only. After
every test the clocks are checked, so that memory that was freed too early fails the test that freed it. Then every
device is waited for, so that memory that is freed later is no error of another test.

`cuda_devices` is a list of all CUDA devices. Without a GPU they are those of a stand-in, in a run that was started by
``python -m nogpu.cuda -m pytest``.
"""

from __future__ import annotations

import gc
import unittest
from collections.abc import Generator

import pytest
import torch

from nogpu import cuda
from nogpu.cuda import libraries
from nogpu.cuda.possible import why_not_here
from nogpu.simulated import (
    SimulationTooLate,
    SimulationUnavailable,
    ToolsMissing,
    device_module,
    extension,
    simulate,
)

__all__ = ["cuda_devices", "settle", "sim_devices"]

# What a test raises that does not fail.
_NO_FAILURE = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)

_devices_key = pytest.StashKey[list[torch.device] | SimulationUnavailable]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the number of devices to the command line and the ini file."""
    text = "how many simulated accelerators the fixture sim_devices is a list of"
    parser.addini("sim_devices", f"{text} (default: 8)", default="8")
    parser.addoption("--sim-devices", type=int, metavar="N", help=f"{text} (default: what the ini file says, or 8)")


def pytest_configure(config: pytest.Config) -> None:
    """Ends the run if the number of devices is no number, even if no test needs it."""
    _number(config)


@pytest.fixture(scope="session")
def sim_devices(pytestconfig: pytest.Config) -> list[torch.device]:
    """A list of simulated accelerators, ``sim:0``, ``sim:1``, ..., as many as ``--sim-devices`` or the ini file says.

    A test that asks for it is skipped if `ToolsMissing` says what the machine lacks, and fails if another
    `SimulationUnavailable` says why there are none.
    """
    devices = _make_once(pytestconfig)
    if isinstance(devices, SimulationTooLate):
        pytest.fail(
            f"{devices}. The fixture sim_devices does so after collection: where a conftest.py or a test file needs "
            "this at import, call nogpu.simulate at the top of conftest.py",
            pytrace=False,
        )
    if isinstance(devices, ToolsMissing):
        pytest.skip(str(devices))
    if isinstance(devices, SimulationUnavailable):
        pytest.fail(str(devices), pytrace=False)
    return list(devices)


@pytest.fixture(scope="session")
def cuda_devices() -> list[torch.device]:
    """A list of all CUDA devices: GPUs, or where there are none those of a stand-in for CUDA.

    A test that asks for it is skipped if there are no CUDA devices in this run.
    """
    if not torch.cuda.is_available():
        why_not = why_not_here()
        remedy = "python -m nogpu.cuda -m pytest runs this test on a stand-in"
        pytest.skip(f"this run has no CUDA devices: {why_not or remedy}")
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> str | None:
    """Says how many devices are simulated, and for how many tests."""
    count = sum(map(_asks, items))
    if count == 0:
        return None
    line = f"simulated accelerators: {_number(config)}, for {count} of {len(items)} tests"
    if torch.cuda.is_available():
        line += "; torch.accelerator means them in this run, so run tests of CUDA in another"
    return line


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Makes the devices before a test can run a backward. If that fails, the fixture says so for each test."""
    stopped = session.testsfailed and not session.config.option.continue_on_collection_errors
    if session.config.option.collectonly or stopped or not any(map(_asks, session.items)):
        return
    try:
        _make_once(session.config)
    except ValueError as error:
        raise pytest.UsageError(f"--sim-devices or the ini file's sim_devices: {error}") from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fails the test if it has freed memory too early."""
    return (yield from _settled(item, "call"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Fails the teardown if the test's fixtures have freed memory too early."""
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
        except RuntimeError as freed:  # the test's own error comes first
            item.add_report_section(when, "simulated accelerators", str(freed))
        raise
    _settle(item)
    return result


def _settle(item: pytest.Item) -> None:
    if not isinstance(item.config.stash.get(_devices_key, None), list) and not cuda.is_stand_in():
        return
    if _asks(item):
        gc.collect()
    settle()


def settle() -> None:
    """Call it at the end of a test: raises for memory that was freed too early, and waits for every device.

    After the wait, memory that is freed later is no error of another test. The devices are simulated ones, a stand-in's
    for CUDA, or both. Of CUDA devices only those are waited for that have a context.

    Raises:
        RuntimeError: ``freed too early: ...``, or for a stand-in what `nogpu.cuda.check_clocks` raises;
            the devices have been waited for then too.
    """
    sim = device_module if extension.C is not None else None
    try:
        if sim is not None:
            sim.check_clocks()
        if cuda.is_stand_in():
            cuda.check_clocks()
    finally:
        if sim is not None:
            for index in range(sim.device_count()):
                sim.synchronize(index)
        if cuda.is_stand_in():
            for index in libraries.counts().contexts:
                torch.cuda.synchronize(index)


def _make_once(config: pytest.Config) -> list[torch.device] | SimulationUnavailable:
    """Returns the devices, or the reason why there are none; makes them at the first call."""
    if _devices_key not in config.stash:
        number = _number(config)
        # A conftest.py that needs them at import has called `simulate` already, perhaps for more devices.
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
