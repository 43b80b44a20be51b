"""A torch that is a few lines, on which a stand-in is a few lines too: for tests of how and when it starts.

The order of the steps, children and arguments are shown so with every build of torch.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import environment

TORCH = """
import os
import multiprocessing  # as torch itself does
from torch import version
print("torch", flush=True)

class cuda:
    device_count = lambda: int(os.environ["FAKE_DEVICES"])
    _lazy_call = lambda function: None

device = lambda kind, index: f"{kind}:{index}"
"""

# It is also the sitecustomize that the stand-in's own one hides.
CUSTOM = """
import os, sys, types
from nogpu import cuda
from nogpu.cuda import extension, libraries, possible, start

libraries.set_link = lambda *link: print(*link, flush=True)

def open_libraries(machine):
    assert "torch" not in sys.modules
    print("libraries", machine.devices, machine.like, flush=True)
    os.environ["FAKE_DEVICES"] = str(machine.devices)

threads = types.ModuleType("nogpu.host_threads")
threads.carry_knowledge = lambda compiled: print("knowledge", flush=True)
threads.wait_at_exit = lambda: None
sys.modules[threads.__name__] = threads
watching = types.ModuleType("nogpu.cuda.watching")
watching.pass_over_tools = watching.host_reads = lambda: None
watching.Blocks = watching.watch_libraries = lambda argument: None
sys.modules[watching.__name__] = watching
libraries.open_libraries = open_libraries
class Compiled:
    def register(self):
        print("register", flush=True)

    def __getattr__(self, name):  # watches of several kinds
        return lambda *arguments: None

extension.load = Compiled
start._make_settings = lambda: None
possible.gpus = lambda: []
"""


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder with that torch."""
    if sys.platform != "linux":
        pytest.skip(f"a stand-in for CUDA needs Linux; this is {sys.platform}")
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text(TORCH)
    (site / "torch" / "version.py").write_text("__version__ = '9.9+cu130'\ncuda = '13.0'\n")
    (site / "sitecustomize.py").write_text(CUSTOM)
    return site


@pytest.fixture
def python(site, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """A function that runs Python with that torch in an empty folder, with these arguments."""
    (tmp_path / "here").mkdir(exist_ok=True)

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess:
        variables = environment(**changes)
        if "PYTHONPATH" not in changes:
            variables["PYTHONPATH"] = f"{site}:{variables['PYTHONPATH']}"
        variables.pop("NOGPU_STAND_IN", None)
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=variables, cwd=tmp_path / "here", capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.fixture
def lines(python) -> Callable[..., list[str]]:
    """As `python`, but returns the lines that it prints, and fails if it fails."""

    def run(*arguments: str, **changes: str) -> list[str]:
        done = python(*arguments, **changes)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run
