"""What tests need that run scripts in processes of their own, most of them with simulated accelerators."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

import dataparallel
from dataparallel.testing.simulated import build

CACHE = str(build._cache())  # before a test moves HOME or the variable

TRY = """
from dataparallel.testing import ToolsMissing, simulate
try:
    simulate(1)
except ToolsMissing as error:
    print(error)
"""


def environment(**changes: str) -> dict[str, str]:
    """The variables for a process that imports this package and finds the accelerators compiled."""
    paths = [str(Path(dataparallel.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCH_EXTENSIONS_DIR": CACHE,
        **changes,
    }


def run(script: str, *arguments: str, timeout: float = 60, **changes: str) -> subprocess.CompletedProcess:
    """Runs a Python script to its end."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=environment(**changes), capture_output=True, text=True, timeout=timeout, check=False
    )


def run_script(script: str, *arguments: str, timeout: float = 60, **changes: str) -> str:
    """What a Python script prints, which has to end well and in time."""
    done = run(script, *arguments, timeout=timeout, **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Job(NamedTuple):
    """A Python script in a process of its own. Of the variables those with an empty value are not set."""

    script: str
    arguments: Sequence[str] = ()
    folder: Path = Path()
    changes: Mapping[str, str] = MappingProxyType({})

    def variables(self) -> dict[str, str]:
        return {name: value for name, value in environment(**self.changes).items() if value}


def run_pytest(folder: Path, *arguments: str, **changes: str) -> Job:
    """Like ``python -m pytest`` in the folder, of a run of its own: its tests wait for none of the run that asks."""
    of_this_run = [name for name in os.environ if name.startswith("DATAPARALLEL_TESTS_")]
    changes |= dict.fromkeys(["PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", *of_this_run], "")
    script = "import runpy; runpy.run_module('pytest', run_name='__main__', alter_sys=True)"
    return Job(script, ["-p", "no:cacheprovider", *arguments], folder, changes)


# Nothing of torch but its import has happened when this forks: a child is what a new interpreter is after that import,
# and ends as an interpreter does.
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
    """The processes of a file's tests, two at a time, forked from one that has imported torch: that takes seconds.

    A test says with the marker ``ahead`` what its own process is to do: the arguments of `job`, a function to a `Job`.
    Those of all chosen tests of the file run in their order from the first one on. For a fixture of module scope with
    the name ``processes``; the fixture ``done`` is then how the test's own has ended, ``printed`` what it has printed.
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
            os.killpg(self._process.pid, signal.SIGKILL)  # what the tests have not waited for
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()


@functools.cache
def attempt() -> subprocess.CompletedProcess:
    """To simulate. For a fixture of module scope: what is compiled there is not on the watchdog's time."""
    return run(TRY, timeout=600)


def skip_without_tools() -> None:
    """For a fixture of module scope too.

    Anything but missing tools, a compiler that refuses for one, is an error of the fixture.
    """
    done = attempt()
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout:
        pytest.skip(done.stdout.strip())
