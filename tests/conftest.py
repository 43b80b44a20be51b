"""Where the suite runs, and what it does when it hangs.

`--devices` picks the kind of slots for the whole process. A test asks for `slots` (a list of
three, or of as many as its marker `slots(2, 8)` says, one run for each), for `root` (the device
of the first slot) or for `make_slots` (a function of the number, for tests that draw it).
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

DEFAULT_SLOTS = 3
WATCHDOG_SECONDS = 120.0

hypothesis.settings.register_profile(
    "dataparallel",
    deadline=None,
    max_examples=50,
    derandomize=bool(os.environ.get("CI")),
    # `slots` and its relatives are values: sharing them between examples is harmless.
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("dataparallel")


def _cpu_slots(count: int) -> list:
    return ["cpu"] * count


def _cuda_slots(count: int) -> list:
    available = torch.cuda.device_count()
    return [torch.device("cuda", slot % available) for slot in range(count)]


# A further kind needs a row here and, if it can be missing, a check in `pytest_configure`.
SLOTS: dict[str, Callable[[int], list]] = {"cpu": _cpu_slots, "cuda": _cuda_slots}

_stderr_key = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--devices",
        choices=sorted(SLOTS),
        default="cpu",
        help="the kind of devices that slots are on (default: cpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slots(*counts): run the test once per number of slots")
    config.addinivalue_line("markers", f"watchdog(seconds): end a run that hangs (default: {WATCHDOG_SECONDS:g} s)")
    if config.getoption("--devices") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(f"--devices=cuda: torch {torch.__version__} sees no CUDA device on this machine")
    # Capturing is suspended while plugins are configured, so this is the terminal's stderr.
    config.stash[_stderr_key] = os.dup(sys.__stderr__.fileno())


def pytest_unconfigure(config: pytest.Config) -> None:
    if _stderr_key in config.stash:
        os.close(config.stash[_stderr_key])
        del config.stash[_stderr_key]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("slots")
    if marker is not None and "slots" in metafunc.fixturenames:
        ids = [f"{count}slots" for count in marker.args]
        metafunc.parametrize("slots", marker.args, indirect=True, ids=ids)


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the whole run, with every thread's traceback, if the test takes too long."""
    marker = request.node.get_closest_marker("watchdog")
    seconds = marker.args[0] if marker is not None else WATCHDOG_SECONDS
    stderr = request.config.stash[_stderr_key]
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt``, also in a process that was started in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def one_intra_op_thread() -> Iterator[None]:
    """For tests of many tiny operators, which otherwise wait mostly for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_slots(request: pytest.FixtureRequest) -> Callable[[int], list]:
    """A function from a number to a list of as many slots."""
    return SLOTS[request.config.getoption("--devices")]


@pytest.fixture
def slots(request: pytest.FixtureRequest, make_slots: Callable[[int], list]) -> list:
    """A list of slots: three, or what the marker `slots` or an indirect parameter says."""
    return make_slots(getattr(request, "param", DEFAULT_SLOTS))


@pytest.fixture
def root(slots: list) -> torch.device:
    """The device of the first slot: where sources, inputs and gathered outputs are."""
    return torch.device(slots[0])
