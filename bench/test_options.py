"""Which suites a command selects, and which files a run writes. Nothing is timed here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from child_processes import environment
from options import BENCH, MAIN_JOB

SUITES = {path.name for path in BENCH.glob("test_*.py")}

TINY = """
from reporting import Report


def test_tiny(reports):
    reports.append(Report("tiny", "Seconds.", {"seconds": "{seconds}"}, rows=[{"seconds": 1.5}]))
"""


def run_pytest(*arguments: str, folder: Path = BENCH.parent) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as a user would."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def collected(*arguments: str) -> set[str]:
    done = run_pytest("--collect-only", "--quiet", *arguments)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    return {Path(line.split("::")[0]).name for line in done.stdout.splitlines() if "::" in line}


def test_a_folder_stands_for_the_main_job_and_a_suite_that_is_named_needs_no_option() -> None:
    assert collected("bench") == {MAIN_JOB.name}
    assert collected("bench/test_forms.py", "bench/test_pairs.py::TestTurns") == {"test_forms.py", "test_pairs.py"}
    assert collected("bench", "bench/test_forms.py") == {MAIN_JOB.name, "test_forms.py"}


def test_all_is_every_suite() -> None:
    assert len(SUITES) > 10
    assert collected("bench", "--all") == SUITES


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the benchmarks and a committed result. Its main job takes no time."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    left_out = shutil.ignore_patterns("__pycache__", "results", "latest", "test_*")
    shutil.copytree(BENCH, tmp_path / "bench", ignore=left_out)
    for name in (".gitignore", "setup.cfg"):
        shutil.copy(BENCH.parent / name, tmp_path)
    (tmp_path / "bench" / MAIN_JOB.name).write_text(TINY)
    result(tmp_path, "results").parent.mkdir()
    result(tmp_path, "results").write_text("committed")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=a")
    return tmp_path


def result(repository: Path, folder: str) -> Path:
    return repository / "bench" / folder / "tiny.rst"


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


class TestResults:
    def test_a_run_without_options_changes_no_file_of_the_repository(self, repository: Path) -> None:
        """It ends with the table and the paths."""
        done = run_pytest("bench", folder=repository)
        assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
        assert "1.5" in result(repository, "latest").read_text()
        assert git(repository, "status", "--porcelain") == ""
        *_, row, rule, blank, text, numbers = done.stdout.splitlines()
        assert (row, rule, blank) == ("1.5", "=======", "")
        assert (text, numbers) == ("table: bench/latest/tiny.rst", "table: bench/latest/tiny.csv")

    def test_committed_results_are_replaced_when_they_are_named(self, repository: Path) -> None:
        run_pytest("bench", "--results=bench/results", folder=repository)
        assert "1.5" in result(repository, "results").read_text()

    def test_a_short_run_does_not_replace_them(self, repository: Path) -> None:
        done = run_pytest("bench", "--short", "--results=bench/results", folder=repository)
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "a short run must not replace" in done.stderr
        assert git(repository, "status", "--porcelain") == ""

    def test_results_of_a_run_that_failed_are_not_written(self, repository: Path) -> None:
        with (repository / "bench" / MAIN_JOB.name).open("a") as file:
            file.write("\n\ndef test_fails():\n    assert False\n")
        done = run_pytest("bench", folder=repository)
        assert "not written to files: not every test has passed" in done.stdout
        assert not result(repository, "latest").exists()
