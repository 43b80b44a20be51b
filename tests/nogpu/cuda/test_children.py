"""Processes that one with a stand-in starts have it too, once they import the same torch."""

import os

import pytest

from nogpu.cuda.inherited import sitecustomize
from nogpu.cuda.start import FOLDER

pytestmark = pytest.mark.devices("cpu")

STARTED = ["libraries 2 v100", "torch", "register", "knowledge"]
START = """
import os, subprocess, sys
from nogpu import cuda
cuda.stand_in(2, like="v100")
def child(*arguments, **changes):
    subprocess.run([sys.executable, *arguments], env={**os.environ, **changes}, check=True)
"""


@pytest.fixture
def of_child(lines):
    """A function that runs a script in a process with a stand-in, and returns what is printed after its start."""

    def run(script: str) -> list[str]:
        printed = lines("-c", START + script)
        assert printed[: len(STARTED)] == STARTED
        return printed[len(STARTED) :]

    return run


def test_a_child_starts_it_when_it_imports_torch(of_child):
    script = "child('-c', 'print(1); import torch; print(torch.cuda.device_count()); import torch.version')"
    assert of_child(script) == ["1", *STARTED, "2"]


def test_a_child_without_torch_does_not_start_it(of_child):
    assert of_child("""child("-c", "import sys, json; print('torch' in sys.modules)")""") == ["False"]


def test_a_child_that_asks_for_others_gets_those(of_child):
    script = "child('-c', 'from nogpu import cuda; cuda.stand_in(3); import torch')"
    assert of_child(script) == ["libraries 3 a100", *STARTED[1:]]


def test_a_child_that_is_told_nothing_sees_the_machine_as_it_is(of_child):
    assert of_child("child('-c', 'import torch', NOGPU_STAND_IN='')") == ["torch"]


def test_a_child_with_another_torch_is_left_alone(of_child, site, tmp_path):
    other = tmp_path / "other"
    (other / "torch").mkdir(parents=True)
    (other / "torch" / "__init__.py").write_text("print('another')")
    paths = os.pathsep.join([FOLDER, str(other), str(site), sitecustomize.ROOT])
    assert of_child(f"child('-c', 'import torch', PYTHONPATH={paths!r})") == ["another"]


def test_the_folder_is_on_the_path_of_children_once_and_on_none_of_theirs(of_child):
    code = "import sys, os; print(os.environ['PYTHONPATH'].count('inherited'), any('inherited' in p for p in sys.path))"
    assert of_child(f"child('-c', {code!r})") == ["1 False"]
    assert of_child(f"cuda.stand_in(2, like='v100'); child('-c', {code!r})") == ["1 False"]


def test_a_failure_in_a_child_is_one_of_its_import_of_torch(of_child):
    script = '''
done = subprocess.run([sys.executable, "-c", """
from nogpu.cuda import libraries, SimulationUnavailable
def fail(machine):
    raise SimulationUnavailable("it cannot be")
libraries.open_libraries = fail
for _ in range(2):
    try:
        import torch
    except SimulationUnavailable as error:
        print(error)
"""], check=True)
'''
    assert of_child(script) == ["it cannot be"] * 2
