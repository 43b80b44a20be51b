import inspect
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import dataparallel
from nogpu.compiling import fingerprint
from nogpu.simulated.extension import EXTENSION

ROOT = Path(__file__).resolve().parent.parent
MADE_UP = {f"dataparallel/kernel.{suffix}" for suffix in ("cpp", "h", "cu")}
PACKAGES = ("dataparallel", "nogpu")
AT_THE_ROOT = ("setup.py", "setup.cfg", "README.rst", "LICENSE", "CHANGELOG.rst", "MANIFEST.in")


def needed_files(package: Path) -> set[str]:
    """Every file of the package except what Python leaves behind."""
    return {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


NEEDED = {name for package in PACKAGES for name in needed_files(ROOT / package)}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy: a build leaves folders in the tree, and old ones leak into the wheel."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in (*PACKAGES, "tests", "bench"):
        if (ROOT / folder).exists():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for name in (*AT_THE_ROOT, "pyproject.toml"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    # Sources of the kinds that later rooms compile on first use.
    for name in MADE_UP:
        (tree / name).touch()
    return tree


@pytest.fixture(scope="module")
def wheel_path(tree, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "--wheel-dir", str(out), str(tree)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(wheel_path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_path)


@pytest.fixture(scope="module")
def sdist_path(tree, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(out)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.tar.gz")
    return built


@pytest.mark.long
@pytest.mark.devices("cpu")  # its process is its own: once is enough
def test_wheel_carries_every_file(wheel):
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == NEEDED | MADE_UP
    assert "dataparallel/py.typed" in inside


@pytest.mark.long
@pytest.mark.devices("cpu")  # its process is its own: once is enough
def test_sdist_carries_every_file_and_no_others(sdist_path):
    with tarfile.open(sdist_path) as archive:
        inside = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    inside = {name for name in inside if ".egg-info/" not in name} - {"PKG-INFO"}
    assert inside == NEEDED | MADE_UP | {*AT_THE_ROOT}


INSTALLED = """
import torch
import dataparallel
from dataparallel import DataParallel
from nogpu.compiling import fingerprint
from nogpu.simulated.extension import EXTENSION

net = torch.nn.Linear(4, 2)
model = DataParallel(net, ["cpu", "cpu"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before, x = net.weight.detach().clone(), torch.ones(6, 4)
model(x).sum().backward()
optimizer.step()
torch.testing.assert_close(net.weight, before - 0.1 * 6)
print(dataparallel.__file__, fingerprint(EXTENSION))
"""


@pytest.mark.long
@pytest.mark.devices("cpu")  # its process is its own: once is enough
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_installed_runs_without_the_repository(kind, request, tmp_path):
    """In an environment of its own, which borrows torch and what else is installed here."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: object) -> str:
        arguments = [*map(str, command)]
        done = subprocess.run(arguments, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    run(*pip, "--no-build-isolation", "--ignore-installed", request.getfixturevalue(f"{kind}_path"))
    assert torch.__version__ in run(python, "-m", "dataparallel")
    where, found = run(python, "-c", INSTALLED).split()
    assert Path(where).parent == site / "dataparallel"
    assert found == fingerprint(EXTENSION), "the sources of the simulated devices are the repository's"


@pytest.mark.long
@pytest.mark.devices("cpu", "cuda")  # its process sees no simulated device: once is enough
def test_import_is_free_of_side_effects():
    code = """
import os, sys, threading
import torch
tasks = lambda: len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0
tasks_before, modules_before = tasks(), set(sys.modules)
from dataparallel import *
from dataparallel.testing import *
new = {name.split(".")[0] for name in set(sys.modules) - modules_before}
assert not new & {"cupy", "cupyx", "pynvml", "pytest"}, new
assert not {"torch.utils.cpp_extension", "torch.testing._internal"} & (set(sys.modules) - modules_before)
assert not torch.cuda.is_initialized()
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert tasks() == tasks_before, (tasks_before, tasks())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def torchs_own(name):
    return getattr(torch.nn.parallel.scatter_gather, name, None) or getattr(torch.nn.parallel, name)


@pytest.mark.parametrize(
    "name", ["DataParallel", "data_parallel", "gather", "parallel_apply", "replicate", "scatter", "scatter_kwargs"]
)
def test_signatures_begin_like_torchs(name):
    """Same parameters in the same order with the same defaults; what is added is keyword-only."""

    torchs, ours = (
        [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]
        for function in (torchs_own(name), getattr(dataparallel, name))
    )
    assert ours[: len(torchs)] == torchs
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, _, kind in ours[len(torchs) :])


def test_helpers_of_tests_and_benchmarks_have_names_of_their_own(pytestconfig: pytest.Config) -> None:
    """pytest's path has all of their folders: of two files with one name it would import the first."""
    folders = pytestconfig.getini("pythonpath")
    helpers = [path.name for folder in folders for path in Path(folder).glob("*.py")]
    shared = {name for name in helpers if helpers.count(name) > 1 and not name.startswith("test_")}
    assert shared <= {"conftest.py"}
