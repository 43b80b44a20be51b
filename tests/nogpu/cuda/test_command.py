"""``python -m nogpu.cuda`` runs a program as Python itself runs it, on a stand-in."""

from pathlib import Path

import pytest

import nogpu

pytestmark = pytest.mark.devices("cpu")

ROOT = str(Path(nogpu.__file__).parents[1])

COMMAND = ("-m", "nogpu.cuda")
STARTED = ["libraries 8 a100"]  # the process that looks for what is missing; the program imports no torch

SHOW = """
import os, sys
import beside_it
print(__name__, os.path.basename(__file__), __spec__ is None, sys.argv, os.path.realpath(sys.path[0]))
print(sys.modules["__main__"].__dict__ is globals())
"""


@pytest.fixture
def script(tmp_path) -> str:
    """A script in another folder than the current one, beside a module that it imports."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside_it.py").touch()
    (tmp_path / "scripts" / "show.py").write_text(SHOW)
    return str(tmp_path / "scripts" / "show.py")


def test_a_script_sees_what_python_shows_it(lines, script):
    arguments = [script, "-x", "--devices", "3", "--", "-m"]
    assert lines(*COMMAND, *arguments) == [*STARTED, *lines(*arguments)]


def test_a_module_sees_what_python_shows_it(lines, tmp_path):
    package = tmp_path / "here" / "package"
    package.mkdir(parents=True)
    (package / "beside_it.py").touch()
    (package / "show.py").write_text(SHOW.replace("import beside_it", "").replace(" is None", ".name"))
    arguments = ["-m", "package.show", "-m", "--help"]
    assert lines(*COMMAND, *arguments) == [*STARTED, *lines(*arguments)]


def test_the_devices_that_are_asked_for(lines, script):
    found = lines(*COMMAND, "--devices", "2", "--like", "h100", script)
    assert found[0] == "libraries 2 h100"


def test_the_status_is_the_programs(python, tmp_path):
    (tmp_path / "ends.py").write_text("import sys; sys.exit(7)")
    assert python(*COMMAND, str(tmp_path / "ends.py")).returncode == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "the following arguments are required"),
        (("--devices", "many", "x.py"), "invalid int value: 'many'"),
        (("--like", "k80", "x.py"), "invalid choice: 'k80'"),
        (("nowhere.py",), "error: there is no file 'nowhere.py' to run; a module is run with -m"),
        (("--devices", "0", "-m", "json.tool"), "error: a stand-in has 1 to 64 devices; got 0"),
    ],
)
def test_mistakes_end_with_a_sentence_and_status_2(python, arguments, words):
    done = python(*COMMAND, *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_machine_that_cannot_have_it_is_told_in_a_sentence(python, site):
    (site / "torch" / "version.py").write_text("__version__ = '9.9'\ncuda = None\n")
    done = python(*COMMAND, "-m", "json.tool")
    assert done.returncode == 2
    assert done.stderr.startswith("python -m nogpu.cuda: error: a stand-in for CUDA needs a torch")
    assert done.stderr.count("\n") == 1


def test_a_python_that_does_not_read_its_environment_is_refused(python):
    start = f"import runpy, sys; sys.path.insert(0, {ROOT!r}); sys.argv[1:] = ['-m', 'json.tool']"
    done = python("-E", "-c", f"{start}; runpy.run_module('nogpu.cuda', run_name='__main__')")
    assert done.returncode == 2
    assert "started with -E, -I or -S" in done.stderr
