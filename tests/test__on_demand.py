"""Importing the package does not import torch, and each public name is what it is, in whatever order it is imported."""

import copy
import importlib
import pickle
import sys
from types import ModuleType

import pytest

import dataparallel
import dataparallel.testing
from processes import run_script
from selection import others_long

# Most start their own processes: once is enough.
pytestmark = pytest.mark.devices("cpu")

PACKAGES = [dataparallel, dataparallel.testing]
WITH_A_FILE_OF_THAT_NAME = ["data_parallel", "parallel_apply", "replicate", "samples"]

by_name = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)


@pytest.mark.parametrize(
    "statement",
    others_long(
        [
            "import dataparallel",
            "import dataparallel.testing",
            "from dataparallel import testing",
            "from dataparallel import __version__",
            "import dataparallel; dir(dataparallel); hasattr(dataparallel, '__wrapped__')",
            "from nogpu import ToolsMissing",
            "from nogpu import cuda; cuda.is_stand_in()",
        ],
        short=["import dataparallel"],
    ),
)
def test_torch_is_not_imported(statement):
    run_script(f"import sys\n{statement}\nassert 'torch' not in sys.modules")


# Forks of one process that has imported torch: each begins without the package. It prints the names that are wrong.
EACH_IN_A_PROCESS_OF_ITS_OWN = """
import importlib, os, sys, types
import torch

def is_right(package, name):
    found = getattr(importlib.import_module(package), name)
    return found.__name__ == f"{package}.{name}" if name in ("nn", "peers") else not isinstance(found, types.ModuleType)

def first_the_name(package, name):
    scope = {}
    exec(f"from {package} import {name} as found", scope)
    return is_right(package, name) and scope["found"] is getattr(sys.modules[package], name)

def first_the_file(package, name):
    if name in sys.argv[1:]:
        importlib.import_module(f"{package}.{name}")
    return is_right(package, name)

def first_others(package, name):
    import dataparallel.composable, dataparallel.testing.pytest, nogpu.simulated
    return is_right(package, name)

def first_the_file_and_then_the_name(package, name):
    first_the_file(package, name)
    return first_the_name(package, name)

def all_by_a_star(package, name):
    scope = {}
    exec(f"from {package} import *", scope)
    return scope[name] is getattr(sys.modules[package], name) and is_right(package, name)

for package in ("dataparallel", "dataparallel.testing"):
    for name in __import__(package, fromlist=["x"]).__all__:
        for check in (first_the_name, first_the_file, first_the_file_and_then_the_name, first_others, all_by_a_star):
            child = os.fork()
            if child == 0:
                for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == "dataparallel"]:
                    del sys.modules[loaded]
                try:
                    right = check(package, name)
                finally:
                    os._exit(0 if sys.exc_info()[0] is None and right else 1)
            if os.waitpid(child, 0)[1] != 0:
                print(package, name, check.__name__)
"""


@pytest.mark.long
def test_each_public_name_in_a_new_process_in_each_order():
    assert run_script(EACH_IN_A_PROCESS_OF_ITS_OWN, *WITH_A_FILE_OF_THAT_NAME, timeout=600) == ""


@by_name
def test_dir_has_every_public_name(package):
    assert set(package.__all__) <= set(dir(package))


@by_name
def test_a_name_that_is_not_there(package):
    with pytest.raises(AttributeError, match=rf"^module '{package.__name__}' has no attribute 'nothing'$"):
        package.nothing  # noqa: B018


@pytest.mark.long
def test_threads_that_ask_first_at_the_same_time():
    run_script("""
import sys, threading
import torch
sys.setswitchinterval(1e-6)
import dataparallel

names = [name for name in dataparallel.__all__ if not name.startswith("_")]
barrier, found = threading.Barrier(len(names)), []

def ask(name):
    barrier.wait()
    found.append(getattr(dataparallel, name))

threads = [threading.Thread(target=ask, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == len(names)
""")


def test_what_a_room_lacks_itself_is_told(monkeypatch, tmp_path):
    (tmp_path / "half.py").write_text("import nobody_has_this")
    monkeypatch.setattr(dataparallel, "__path__", [*dataparallel.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="nobody_has_this"):
        dataparallel.half  # noqa: B018


def test_a_public_name_can_be_replaced(monkeypatch):
    """Only what Python itself does after an import is not done."""
    room = importlib.import_module("dataparallel.samples")
    for instead in (len, ModuleType("samples")):
        monkeypatch.setattr(dataparallel, "samples", instead)
        assert dataparallel.samples is instead
    monkeypatch.undo()
    assert dataparallel.samples is room.samples


@by_name
def test_a_package_is_copied_and_pickled_as_itself(package):
    assert copy.deepcopy(package) is package
    assert pickle.loads(pickle.dumps(package)) is sys.modules[package.__name__]
