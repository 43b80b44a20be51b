"""``python -m nogpu.cuda`` runs a program as Python itself runs it, on a stand-in."""

from pathlib import Path

import pytest

import nogpu
from stand_in import WHY_NOT, needs_stand_in

pytestmark = pytest.mark.devices("cpu")

ROOT = str(Path(nogpu.__file__).parents[1])

COMMAND = ("-m", "nogpu.cuda")

SHOW = """
import os, sys
print(__name__, os.path.basename(__file__), __spec__ is None, sys.argv, os.path.realpath(sys.path[0]))
print(sys.modules["__main__"].__dict__ is globals())
"""


@needs_stand_in
@pytest.mark.parametrize("program", [["scripts/show.py"], ["-m", "scripts.show"]], ids=["script", "module"])
def test_a_program_sees_what_python_shows_it(printed, tmp_path, program):
    folder = tmp_path / "here" / "scripts"
    folder.mkdir()
    (folder / "show.py").write_text(SHOW)
    arguments = [*program, "-x", "--devices", "3", "--", "-m", "--help"]
    assert printed(*COMMAND, *arguments) == printed(*arguments)


@needs_stand_in
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


@pytest.mark.skipif(WHY_NOT is None, reason="for a machine that can have a stand-in")
def test_a_machine_that_cannot_have_it_is_told_in_a_sentence(python):
    done = python(*COMMAND, "-m", "json.tool")
    assert done.returncode == 2
    assert done.stderr == f"python -m nogpu.cuda: error: {WHY_NOT}\n"


def test_a_python_that_does_not_read_its_environment_is_refused(python):
    start = f"import runpy, sys; sys.path.insert(0, {ROOT!r}); sys.argv[1:] = ['-m', 'json.tool']"
    done = python("-E", "-c", f"{start}; runpy.run_module('nogpu.cuda', run_name='__main__')")
    assert done.returncode == 2
    assert "started with -E, -I or -S" in done.stderr
