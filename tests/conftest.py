"""The devices that the tests run on, and the fixtures that they share.

Some ideas are plugins of their own, in files beside this one: `kinds` runs the tests on each kind of devices,
`selection` says which tests run, `company` lets a test run alone, and `watchdog` ends a run that hangs.

``pytest`` runs the short tests on CPU slots and on simulated devices, ``pytest --all`` all tests. `--devices` picks one
kind, `--sim-devices` the number of simulated devices, and `--arrangement` the devices of the slots. A test asks for
`slots` (a list of three slots, or one run for each number in its marker `slots(2, 8)`), for `root` (the device of the
first slot) or for `make_slots` (a function from a number to slots, for tests that draw the number). With
`slots(2, long=[8])`, the run with eight is one of the long tests. A test marked `devices("sim", "stand-in")` runs on
these kinds only: those that have clocks. One marked `apart(2)` needs two devices, for slots that do not share one.
With `--no-skips`, a run fails if any test is skipped.
"""

import gc
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from dataparallel import DataParallel, user_warnings
from dataparallel.comm.streams import arrivals, held
from dataparallel.comm.streams.current import Event
from each_form import FORMS, Form
from nogpu.cuda import is_stand_in
from nogpu.cuda.possible import why_not_here
from nogpu.pytest import settle
from nogpu.simulated import SimulationUnavailable, ToolsMissing, simulate
from processes import Ahead, run_script
from spare_streams import make_library_streams
from stand_in import STAND_IN, fits

pytest_plugins = ["company", "kinds", "selection", "watchdog"]

DEFAULT_SLOTS = 3
SIMULATED = 8  # what tests of the simulated devices themselves rely on

# The index of the device for each of `count` slots, where there are `available` devices.
ARRANGEMENTS: dict[str, Callable[[int, int], list[int]]] = {
    "distinct": lambda count, available: [slot % available for slot in range(count)],
    "duplicates": lambda count, available: [slot // 2 % available for slot in range(count)],
    "reversed": lambda count, available: [slot % available for slot in reversed(range(count))],
    "subset": lambda count, available: [(slot + 1) * 3 % available for slot in range(count)],
}

_why_not_key = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sim-devices",
        type=int,
        default=SIMULATED,
        help=f"how many, also of a stand-in for CUDA (default: {SIMULATED})",
    )
    parser.addoption(
        "--arrangement",
        choices=sorted(ARRANGEMENTS),
        default="distinct",
        help="which devices the slots are on (default: distinct)",
    )
    parser.addoption("--no-skips", action="store_true", help="a run fails if any test is skipped, whatever the reason")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slots(*counts, long=[]): once per number of slots, with --all those of long")
    config.addinivalue_line("markers", f"apart(count={DEFAULT_SLOTS}): its slots need so many devices")
    config.addinivalue_line("markers", "counts_memory: a stand-in's events have passed when the library asks")
    config.addinivalue_line("markers", "ahead(...): what the test's own process is to do, see processes.Ahead")
    kind = config.getoption("--devices")
    if kind == "cuda" and not torch.cuda.is_available():
        problem = f"torch {torch.__version__} sees no CUDA device on this machine"
        raise pytest.UsageError(f"--devices=cuda: {problem}, and {why_not_here() or 'its driver is at fault'}")
    if kind == "cuda":
        make_library_streams(map(torch.device, range(torch.cuda.device_count())))
    if kind == "sim":
        try:
            make_library_streams(simulate(config.getoption("--sim-devices")))
        except ToolsMissing as error:
            config.stash[_why_not_key] = str(error)
        except (SimulationUnavailable, ValueError) as error:
            raise pytest.UsageError(f"--devices=sim: {error}") from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("slots")
    if marker is not None and "slots" in metafunc.fixturenames:
        counts = [pytest.param(count, id=f"{count}slots") for count in marker.args]
        long = marker.kwargs.get("long", [])
        counts += [pytest.param(count, id=f"{count}slots", marks=pytest.mark.long) for count in long]
        metafunc.parametrize("slots", counts, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    why_not = config.stash.get(_why_not_key, None)
    for item in items:
        marker = item.get_closest_marker("devices")
        if why_not is not None:
            item.add_marker(pytest.mark.skip(reason=why_not))
        elif marker is not None and not fits(marker, config):
            kinds = " or ".join(f"cuda on a {STAND_IN}" if each == STAND_IN else each for each in marker.args)
            item.add_marker(pytest.mark.skip(reason=f"for --devices={kinds}"))
        elif marker is not None and marker.args == ("sim",) and config.getoption("--sim-devices") < SIMULATED:
            item.add_marker(pytest.mark.skip(reason=f"for {SIMULATED} simulated devices"))
        elif (too_few := why_not_apart(item, config)) is not None:
            item.add_marker(pytest.mark.skip(reason=too_few))


def why_not_apart(item: pytest.Item, config: pytest.Config) -> str | None:
    """Why a test marked `apart` cannot run: there are too few devices for slots that do not share one."""
    marker = item.get_closest_marker("apart")
    if marker is None or config.getoption("--devices") == "cpu":
        return None
    needed, there = next(iter(marker.args), DEFAULT_SLOTS), torch.accelerator.device_count()
    return f"its slots need {needed} devices, and here is {there}" if there < needed else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What has been skipped must not pass for success where ``--no-skips`` says so."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # pytest-xdist's own processes have none
    if session.config.getoption("--no-skips") and reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line("\n--no-skips: tests have been skipped, see below", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    """What is there before the first test is no garbage: a test that collects need not walk through all of torch."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor is what the tests of a file have imported: a compiler alone is a million objects."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def nothing_freed_too_early(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the clocks find when memory is freed belongs to the test that caused it.

    A stand-in does its work at once. But no event has passed when the library asks, as where the host runs ahead of
    GPUs: the clocks would take the answer for a wait of the host. Then memory is held until the test ends, except in
    tests that are marked `counts_memory`.
    """
    kind = request.config.getoption("--devices")
    is_cuda = kind == "cuda" and is_stand_in()
    if is_cuda and request.node.get_closest_marker("counts_memory") is None:
        monkeypatch.setattr(Event, "has_passed", lambda event: False)
    yield
    if kind == "sim" or is_cuda:
        settle()
    if is_cuda:
        held._held.clear()


@pytest.fixture(autouse=True)
def the_current_device_stays() -> Iterator[None]:
    """A test that sets a stream makes its device current, and the next test must not find it so."""
    if not torch.accelerator.is_available():
        yield
        return
    device = torch.accelerator.current_device_index()
    yield
    torch.accelerator.set_device_index(device)


@pytest.fixture(autouse=True)
def small_models_are_like_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters may be late too, so that all tests look for what a late copy could break."""
    monkeypatch.setattr(arrivals, "LATE_FROM_BYTES", 0)


@pytest.fixture
def done(request: pytest.FixtureRequest, processes: Ahead) -> subprocess.CompletedProcess:
    """How the process of a test has ended that is marked `ahead`, in a file with the fixture `processes`."""
    return processes.done(request.node)


@pytest.fixture
def printed(done: subprocess.CompletedProcess) -> str:
    """What that process has printed, which has ended well."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def result(done: subprocess.CompletedProcess) -> pytest.RunResult:
    """Of a run of pytest in that process, shown where the test fails."""
    print(done.stdout, done.stderr, sep="\n")
    return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt``, also in a process that was started in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def one_intra_op_thread() -> None:
    """Tests run many tiny operators, which otherwise wait mostly for each other's threads."""
    torch.set_num_threads(1)


@pytest.fixture
def make_slots(request: pytest.FixtureRequest) -> Callable[[int], list]:
    """A function from a number to a list of as many slots."""
    kind = request.config.getoption("--devices")
    if kind == "cpu":
        return lambda count: ["cpu"] * count
    arrangement = ARRANGEMENTS[request.config.getoption("--arrangement")]
    return lambda count: [torch.device(kind, index) for index in arrangement(count, torch.accelerator.device_count())]


@pytest.fixture
def slots(request: pytest.FixtureRequest, make_slots: Callable[[int], list]) -> list:
    """A list of slots: three, or what the marker `slots` or an indirect parameter says."""
    return make_slots(getattr(request, "param", DEFAULT_SLOTS))


@pytest.fixture
def root(slots: list) -> torch.device:
    """The device of the first slot: where sources, inputs and gathered outputs are."""
    return torch.device(slots[0])


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed by reference counting."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def warnings_are_errors() -> Iterator[None]:
    """Those that torch shows once for a process too."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_warn_always(before)


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that come once come, as in a process that has given none."""
    monkeypatch.setattr(user_warnings, "_said", {})


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def without_graph(request: pytest.FixtureRequest) -> Callable:
    """A context in which no graph is recorded."""
    return request.param


@pytest.fixture
def gathers_are_errors() -> Iterator[None]:
    """Operators that would gather sharded tensors raise: for tests of what works on parts."""
    from dataparallel.sharded import allow_gathers

    allow_gathers(False)
    yield
    allow_gathers(None)


@pytest.fixture
def gathers(gathers_are_errors: None) -> None:
    """Operators may gather sharded tensors."""
    from dataparallel.sharded import allow_gathers

    allow_gathers(True)


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    """A form: a function from a module and slots to what is called in the module's place."""
    made: Form = request.param
    return made


@pytest.fixture
def wrapped(net: torch.nn.Module, slots: list) -> DataParallel:
    """The test file's `net` on the slots."""
    return DataParallel(net, slots)


@pytest.fixture
def call(wrapped: DataParallel, x: torch.Tensor, without_graph: Callable) -> Callable[..., torch.Tensor]:
    """A call of `wrapped` without a graph, with the test file's `x` or its first `samples`."""

    def call(samples: int | None = None) -> torch.Tensor:
        with without_graph():
            return wrapped(x if samples is None else x[:samples])

    return call


@pytest.fixture
def stream() -> torch.Stream:
    """A stream of device 1 beside the current one, which has waited for all that was launched there before."""
    side = torch.Stream(torch.device(1))
    side.wait_stream(torch.accelerator.current_stream(1))
    return side


@pytest.fixture(scope="session")
def compiled_libraries() -> None:
    """The libraries in place of CUDA's, which may take longer than a script has."""
    run_script("import cudart", timeout=900)
