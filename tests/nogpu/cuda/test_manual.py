"""The program of ``docs/nogpu/cuda.rst`` fails as the page says, and passes with the line that it adds."""

import re

import pytest

from documents import DOCS, blocks_of
from stand_in import IN_OWN_PROCESSES

PAGE = DOCS / "nogpu" / "cuda.rst"
pytestmark = [*IN_OWN_PROCESSES, pytest.mark.watchdog(900)]  # the first one may compile

program, remedy, start, tests, asked = (block.text for block in blocks_of(PAGE))


def test_the_program_fails_with_the_words_of_the_page(python, tmp_path):
    (tmp_path / "program.py").write_text(program)
    done = python("-m", "nogpu.cuda", str(tmp_path / "program.py"))
    assert done.returncode == 1
    (words,) = re.findall(r"^\.\. code-block:: text\n\n((?:    .*\n)+)", PAGE.read_text(encoding="utf-8"), re.M)
    assert " ".join(words.split()) in " ".join(done.stderr.split())
    assert "z = there.relu()" in done.stderr


def test_the_program_passes_with_the_line_of_the_page(printed, tmp_path):
    (tmp_path / "program.py").write_text(program.replace("z = ", f"{remedy}z = "))
    printed("-m", "nogpu.cuda", str(tmp_path / "program.py"))


def test_a_program_starts_it_as_the_page_does(printed):
    told = printed("-c", f"{start}print(devices, torch.cuda.get_device_name(0))")
    assert "index=3" in told
    assert "H100" in told


def test_a_run_of_pytest_has_the_fixture(printed, tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["nogpu.pytest"]\n')
    (tmp_path / "test_page.py").write_text(tests)
    command = ["-m", "nogpu.cuda", "--devices", "2", "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    assert "1 passed" in printed(*command, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def test_what_the_page_asks_of_a_step_that_is_right(printed, tmp_path):
    step = "x = torch.ones(3, device='cuda:0')\ndef step():\n    x.add_(1)\nstep()\n"
    (tmp_path / "program.py").write_text(f"import torch\n{step}{asked}")
    printed("-m", "nogpu.cuda", str(tmp_path / "program.py"))
