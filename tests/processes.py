"""Helpers of tests that run scripts in separate processes, most of them with simulated accelerators."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

import dataparallel
from nogpu.compiling import path_of
from nogpu.simulated.extension import EXTENSION

CACHE = str(path_of(EXTENSION).parents[1])  # read before a test changes HOME or TORCH_EXTENSIONS_DIR

TRY = """
from nogpu import ToolsMissing, simulate
try:
    simulate(1)
except ToolsMissing as error:
    print(error)
"""


def environment(**changes: str) -> dict[str, str]:
    """The variables of a process that imports this package and uses the same compiled accelerators."""
    paths = [str(Path(dataparallel.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCH_EXTENSIONS_DIR": CACHE,
        **changes,
    }


def run(script: str, *arguments: str, timeout: float = 60, **changes: str) -> subprocess.CompletedProcess:
    """Runs a Python script in a new process, and waits for its end."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=environment(**changes), capture_output=True, text=True, timeout=timeout, check=False
    )


def run_script(script: str, *arguments: str, timeout: float = 60, **changes: str) -> str:
    """Runs a Python script and returns what it prints. Fails if the script fails or takes too long."""
    done = run(script, *arguments, timeout=timeout, **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_ranks(folder: Path, count: int, script: str, **changes: str) -> list[subprocess.CompletedProcess]:
    """Runs a Python script in as many processes at once. ``TEST_RANK`` tells each its number."""
    started = []
    for rank in range(count):
        variables = environment(TEST_RANK=str(rank), TEST_WORLD=str(count), TEST_FOLDER=str(folder), **changes)
        command = [sys.executable, "-c", script]
        started.append(
            subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    until = time.monotonic() + 55
    try:
        printed = [each.communicate(timeout=max(until - time.monotonic(), 0.1))[0] for each in started]
    finally:
        for each in started:
            each.kill()
    return [
        subprocess.CompletedProcess(each.args, each.returncode, text)
        for each, text in zip(started, printed, strict=True)
    ]


class Job(NamedTuple):
    """A Python script for a separate process. In ``changes`` an empty value removes the variable."""

    script: str
    arguments: Sequence[str] = ()
    folder: Path = Path()
    changes: Mapping[str, str] = MappingProxyType({})

    def variables(self) -> dict[str, str]:
        return {name: value for name, value in environment(**self.changes).items() if value}


def run_pytest(folder: Path, *arguments: str, **changes: str) -> Job:
    """Returns the job that runs ``python -m pytest`` in the folder, apart from the run of this test."""
    of_this_run = [name for name in os.environ if name.startswith("DATAPARALLEL_TESTS_")]
    changes |= dict.fromkeys(["PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", *of_this_run], "")
    script = "import runpy; runpy.run_module('pytest', run_name='__main__', alter_sys=True)"
    return Job(script, ["-p", "no:cacheprovider", *arguments], folder, changes)


# This process has only imported torch when it forks. So a child starts as a new interpreter does after that import, and
# ends like one.
FORKS = """
import json, os, signal, sys, types
import torch

waiting, running = list(enumerate(json.load(sys.stdin))), {}
while waiting or running:
    if waiting and len(running) < 2:
        number, job = waiting.pop(0)
        child = os.fork()
        if child == 0:
            break
        running[child] = number
    else:
        child, status = os.wait()
        print(json.dumps([running.pop(child), os.waitstatus_to_exitcode(status)]), flush=True)
else:
    sys.exit()
script, sys.argv, folder, variables, *outputs = job
for descriptor, path in enumerate([os.devnull, *outputs]):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
os.chdir(folder)
os.environ.clear()
os.environ.update(variables)
signal.alarm(60)  # ends it where it hangs
main = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(script, "<script>", "exec"), main.__dict__)
"""


class Ahead:
    """Runs the processes of a file's tests ahead of the tests, two at a time.

    They are forked from one process that has imported torch, because that import takes seconds. A test says with the
    marker ``ahead`` what its process does: the marker has the arguments of `job`, a function that returns a `Job`. The
    processes of all selected tests of the file start with the first test, and run in the order of the tests.

    A test file makes it in a fixture ``processes`` of module scope. The fixture ``done`` then tells how the process of
    a test has ended, and ``printed`` what it has printed.
    """

    def __init__(self, request: pytest.FixtureRequest, folder: Path, job: Callable[..., Job] = Job) -> None:
        if not hasattr(os, "fork"):
            pytest.skip("this system cannot fork")
        self._folder = folder
        self._items: list[pytest.Item] = []
        self._jobs: list[Job] = []
        self._codes: dict[int, int] = {}
        for item in request.session.items:
            marker = item.get_closest_marker("ahead")
            if marker is not None and item.path == request.path:
                self._items.append(item)
                self._jobs.append(job(*marker.args, **marker.kwargs))
        told = [
            (job.script, ["-c", *job.arguments], str(job.folder), job.variables(), *map(str, self._outputs(number)))
            for number, job in enumerate(self._jobs)
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            json.dump(told, stdin)

    def _outputs(self, number: int) -> list[Path]:
        return [self._folder / f"{number}.{name}" for name in ("stdout", "stderr")]

    def done(self, item: pytest.Item) -> subprocess.CompletedProcess:
        """Waits for the process of this test; its arguments are the `Job`."""
        number = self._items.index(item)
        assert self._process.stdout is not None
        while number not in self._codes:
            line = self._process.stdout.readline()
            assert line, "the process that forks the others has ended"
            ended, code = json.loads(line)
            self._codes[ended] = code
        outputs = [path.read_text() for path in self._outputs(number)]
        return subprocess.CompletedProcess(self._jobs[number], self._codes[number], *outputs)

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # processes that no test has waited for
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()


def ahead(table: str) -> pytest.MarkDecorator:
    """Runs a test once for the process of each program of a table. A program begins with a line ``#: its name``."""
    _, *parts = re.split(r"^#: (.*)\n", table, flags=re.MULTILINE)
    rows = zip(parts[::2], parts[1::2], strict=True)
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.ahead(program)) for name, program in rows]
    )


@functools.cache
def attempt() -> subprocess.CompletedProcess:
    """Runs `simulate` in a process, once. In a fixture of module scope the watchdog does not count the compilation."""
    return run(TRY, timeout=600)


def skip_without_tools() -> None:
    """Skips the tests of a fixture of module scope if the tools for compiling are missing.

    Any other failure, for example of the compiler, is an error of the fixture.
    """
    done = attempt()
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout:
        pytest.skip(done.stdout.strip())
