"""Runs the tests on every kind of devices that this machine has: one process for each, side by side.

Simulated devices become the accelerator of their process (`torch.accelerator`), so each kind needs a process of its
own. Without `--devices`, the process that was started runs no test itself. It starts one process for each kind, with
the same arguments and `--devices=KIND`, passes signals on, and ends with the worst of their exit statuses. The first
kind writes to the terminal; what the others write is shown afterwards, live where they still run.

CUDA devices are GPUs where there are some. Where there are none, but torch is built for CUDA, ``--devices=cuda`` runs
on a stand-in for CUDA, which has to be there before torch is imported: so another process takes the place of this one.

Each process finds two variables in its environment: `RUNNING` says which kinds the others run, and `company.ROOM` where
tests wait for those of the others.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from company import ROOM
from nogpu.cuda import is_stand_in
from nogpu.cuda.possible import why_not_here
from stand_in import fits

KINDS = ("cpu", "sim", "cuda")
RUNNING = "DATAPARALLEL_TESTS_KINDS"

# With one of these, a run answers a question and runs no test: one process is enough.
QUESTIONS = (
    "help", "version", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow", "collectonly", "setupplan",
)  # fmt: skip

# With one of these, the kinds run one after the other in the foreground, where a debugger reads what is typed.
FOREGROUND = ("usepdb", "trace")

# A file or folder that each process would write over the others'.
ONE_PLACE = {"xmlpath": "--junitxml", "basetemp": "--basetemp", "pastebin": "--pastebin", "looponfail": "--looponfail"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--devices",
        choices=KINDS,
        help="the kind of devices that slots are on. Without it, cpu and sim run side by side, each in a process of "
        "its own, and cuda too where torch.cuda.is_available(). With --pdb they run one after the other. cuda is a "
        "stand-in where torch is built for CUDA and there is no GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    what = "only with one of these kinds of --devices; stand-in is cuda on a stand-in, which has clocks"
    config.addinivalue_line("markers", f"devices(*kinds): {what}")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Says what CUDA devices are."""
    if config.option.devices != "cuda":
        return None
    if is_stand_in():
        return "cuda: torch's CUDA build on a stand-in runtime, no GPU"
    import torch

    return f"cuda: {torch.cuda.device_count()} GPUs, the first a {torch.cuda.get_device_name(0)}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that another process of this run runs. They would only be skipped here."""
    running = {*os.environ.get(RUNNING, "").split()}
    chosen, others = [], []
    for item in items:
        marker = item.get_closest_marker("devices")
        elsewhere = marker is not None and not fits(marker, config) and {*marker.args} & running
        (others if elsewhere else chosen).append(item)
    if others:
        items[:] = chosen
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Runs each kind in a process of its own, where the command line names none."""
    options = config.option
    if options.devices == "cuda" and needs_stand_in():
        sys.stdout.flush()
        os.execv(sys.executable, _command(config, "cuda"))  # a signal and a debugger reach it as they would this one
    if options.devices is not None:
        return None
    if any(getattr(options, name, None) for name in QUESTIONS):
        options.devices = KINDS[0]
        return None
    for name, flag in ONE_PLACE.items():
        if getattr(options, name, None):
            raise pytest.UsageError(f"{flag} is for one process: say which with --devices={'|'.join(KINDS)}")
    in_foreground = any(getattr(options, name, None) for name in FOREGROUND)
    statuses = _one_after_the_other(config) if in_foreground else _side_by_side(config)
    _heading("each kind of devices")
    for kind, status in statuses.items():
        print(f"--devices={kind}: {'passed' if status == pytest.ExitCode.OK else f'exit status {status}'}")
    return worst(statuses.values())


def _heading(words: str) -> None:
    print(f" {words} ".center(shutil.get_terminal_size().columns, "="), flush=True)


def available() -> list[str]:
    """The kinds that a run without `--devices` is for."""
    import torch  # takes seconds, which only this process needs

    return [kind for kind in KINDS if kind != "cuda" or torch.cuda.is_available()]


def needs_stand_in() -> bool:
    """True if CUDA devices have to be a stand-in's, and this process has none. There is no GPU, and no obstacle."""
    import torch

    return not torch.cuda.is_available() and not is_stand_in() and why_not_here() is None


def worst(statuses: Iterable[int]) -> int:
    """A failure before success, and success before the lack of tests; what a signal has ended, as a shell says it."""
    found = sorted({128 - status if status < 0 else int(status) for status in statuses})
    failures = [status for status in found if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)]
    return failures[-1] if failures else found[0]


def _command(config: pytest.Config, kind: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", *config.invocation_params.args, f"--devices={kind}"]
    if kind == "cuda" and needs_stand_in():
        number = str(config.getoption("--sim-devices", 8))
        command[1:1] = ["-m", "nogpu.cuda", "--devices", number]
    if config.pluginmanager.has_plugin("cacheprovider"):
        # Each kind remembers its own failures for --last-failed.
        command.append(f"--override-ini=cache_dir={Path(config.getini('cache_dir')) / kind}")
    return command


def _one_after_the_other(config: pytest.Config) -> dict[str, int]:
    return {kind: subprocess.call(_command(config, kind), cwd=config.invocation_params.dir) for kind in available()}


def _side_by_side(config: pytest.Config) -> dict[str, int]:
    running: dict[str, subprocess.Popen] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dataparallel-tests-")))
        stack.enter_context(_signals_passed_on(running))
        first, *others = available()
        _heading(f"--devices={first}; beside it, shown afterwards: {', '.join(others)}")
        running[first] = _start(config, first, folder)
        for kind in others:
            running[kind] = _start(config, kind, folder, stack.enter_context((folder / kind).open("wb")))
        running[first].wait()
        for kind in others:
            _heading(f"--devices={kind}")
            _follow(folder / kind, running[kind])
    return {kind: process.wait() for kind, process in running.items()}


def _start(config: pytest.Config, kind: str, folder: Path, output: BinaryIO | None = None) -> subprocess.Popen:
    command = _command(config, kind)
    if output is not None and config.option.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        command.append("--color=yes")  # the file is no terminal, but is shown on one
    return subprocess.Popen(
        command,
        cwd=config.invocation_params.dir,
        env={**os.environ, ROOM: str(folder), RUNNING: " ".join(available())},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,  # a signal reaches it once, from here
    )


def _follow(path: Path, process: subprocess.Popen) -> None:
    """Shows what the process has written to the file, and what it writes there until it ends."""
    with path.open("rb") as written:
        ended = False
        while not ended:
            try:
                process.wait(0.2)
                ended = True  # and has written its last: show that too
            except subprocess.TimeoutExpired:
                pass
            sys.stdout.buffer.write(written.read())
            sys.stdout.buffer.flush()


@contextmanager
def _signals_passed_on(running: dict[str, subprocess.Popen]) -> Iterator[None]:
    """Ctrl-C ends the processes, each with its summary, and then this one."""

    def pass_on(number: int, frame: object) -> None:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        pass_on(signal.SIGTERM, None)  # if an error has ended this run before them
        for number, handler in before.items():
            signal.signal(number, handler)
