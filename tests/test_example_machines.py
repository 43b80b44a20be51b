"""``examples/two_machines.py`` runs as ``docs/guide/machines.rst`` says, and a killed run goes on to the same bits.

``torchrun`` starts two processes of its own for it. They talk by gloo and have slots on the CPU.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from documents import DOCS
from example_programs import EXAMPLES, variables

# Their processes are their own: once is enough.
pytestmark = [
    pytest.mark.devices("cpu"),
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
    ),
]

PAGE = DOCS / "guide" / "machines.rst"
SECONDS = 100


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts the command of the page in a folder. What is left of it at the end is killed."""
    (command,) = re.findall(r"^    torchrun (.*) examples/two_machines.py$", PAGE.read_text(encoding="utf-8"), re.M)
    started = []

    def begin(folder: Path) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *shlex.split(command), EXAMPLES / "two_machines.py"],
                cwd=folder,
                env=variables(),
                stdout=subprocess.PIPE,
                stderr=(folder / "stderr").open("a"),
                text=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            process.terminate()  # it ends its processes
        process.wait(SECONDS)
        process.stdout.close()


def ended(process: subprocess.Popen[str], folder: Path) -> list[str]:
    """The lines that it prints from now on. Fails if it fails."""
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, printed + (folder / "stderr").read_text()
    return printed.splitlines()


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory) -> tuple[Path, list[str]]:
    """The checkpoint of a run that nobody disturbs, and what it prints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    printed = ended(start(folder), folder)
    return folder / "checkpoint.pt", printed


@pytest.mark.long
def test_the_example_runs_and_learns(undisturbed):
    checkpoint, printed = undisturbed
    losses = [float(line.rpartition(" ")[2]) for line in printed]
    assert len(losses) == torch.load(checkpoint)["epoch"] + 1
    assert losses[-1] < losses[0] / 2


def worker(launcher: int, rank: int) -> int:
    """The process of this rank among those that ``torchrun`` has started."""
    psutil = pytest.importorskip("psutil")
    found = [child for child in psutil.Process(launcher).children() if child.environ().get("RANK") == str(rank)]
    assert len(found) == 1
    return found[0].pid


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_to_the_same_bits(start, undisturbed, tmp_path):
    """First one rank is killed, then the other in the run that went on."""
    expected, printed = undisturbed
    seen = []
    for rank in (1, 0):
        process = start(tmp_path)
        seen.append(process.stdout.readline().rstrip("\n"))
        os.kill(worker(process.pid, rank), signal.SIGKILL)
        more, _ = process.communicate(timeout=SECONDS)  # the processes go on until the signal arrives
        seen += more.splitlines()
        assert process.returncode != 0
    last = ended(start(tmp_path), tmp_path)
    assert printed[0] not in last, "the last run has begun from the start"
    assert set(seen) | set(last) <= set(printed)
    assert_same(torch.load(tmp_path / "checkpoint.pt"), torch.load(expected))


def assert_same(found: dict, expected: dict) -> None:
    """Raises `AssertionError` unless two checkpoints are the same bit by bit."""
    mine, others = (torch.utils._pytree.tree_flatten(state) for state in (found, expected))
    assert mine[1] == others[1]
    for leaf, other in zip(mine[0], others[0], strict=True):
        if isinstance(leaf, torch.Tensor):
            torch.testing.assert_close(leaf, other, rtol=0, atol=0)
        else:
            assert leaf == other
