"""The program of ``docs/nogpu/cuda.rst`` fails as the page says, and passes with the line that it adds."""

import os
import re
import subprocess
import sys

import pytest

from documents import DOCS, blocks_of
from processes import environment
from stand_in import IN_OWN_PROCESSES

PAGE = DOCS / "nogpu" / "cuda.rst"
pytestmark = [*IN_OWN_PROCESSES, pytest.mark.watchdog(900)]  # the first one may compile

program, remedy, start, tests, asked = (block.text for block in blocks_of(PAGE))


def run(folder, *command: str) -> subprocess.CompletedProcess:
    variables = {**environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"), "NOGPU_STAND_IN": ""}
    command = [sys.executable, "-m", "nogpu.cuda", *command]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def test_the_program_fails_with_the_words_of_the_page(tmp_path):
    (tmp_path / "program.py").write_text(program)
    done = run(tmp_path, "program.py")
    assert done.returncode == 1
    (words,) = re.findall(r"^\.\. code-block:: text\n\n((?:    .*\n)+)", PAGE.read_text(encoding="utf-8"), re.M)
    assert " ".join(words.split()) in " ".join(done.stderr.split())
    assert "z = there.relu()" in done.stderr


def test_the_program_passes_with_the_line_of_the_page(tmp_path):
    (tmp_path / "program.py").write_text(program.replace("z = ", f"{remedy}z = "))
    done = run(tmp_path, "program.py")
    assert done.returncode == 0, done.stderr


def test_a_program_starts_it_as_the_page_does(tmp_path):
    (tmp_path / "program.py").write_text(f"{start}print(devices, torch.cuda.get_device_name(0))")
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "index=3" in done.stdout
    assert "H100" in done.stdout


def test_a_run_of_pytest_has_the_fixture(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["nogpu.pytest"]\n')
    (tmp_path / "test_page.py").write_text(tests)
    done = run(tmp_path, "--devices", "2", "-m", "pytest", "-p", "no:cacheprovider", os.fspath(tmp_path))
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_what_the_page_asks_of_a_step_that_is_right(tmp_path):
    step = "x = torch.ones(3, device='cuda:0')\ndef step():\n    x.add_(1)\nstep()\n"
    (tmp_path / "program.py").write_text(f"import torch\n{step}{asked}")
    done = run(tmp_path, "program.py")
    assert done.returncode == 0, done.stderr
