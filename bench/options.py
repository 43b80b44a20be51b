"""The options of the benchmarks: which suites run, how thoroughly, and where their results go."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent
MAIN_JOB = BENCH / "test_main_job.py"
COMMITTED = BENCH / "results"
LATEST = BENCH / "latest"  # ignored by git


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks of dataparallel")
    group.addoption(
        "--all",
        action="store_true",
        dest="all_suites",
        help="run every suite, not only the main job (half an hour on two cores); to run a single suite, name its file "
        "instead",
    )
    group.addoption(
        "--short",
        action="store_true",
        help="a quick check that everything runs, with too few repetitions to judge any time by",
    )
    group.addoption(
        "--results",
        type=Path,
        default=LATEST,
        metavar="DIR",
        help="the folder for tables and plots (default: bench/latest, which git ignores); --results=bench/results "
        "replaces the results that are committed",
    )


def check_options(config: pytest.Config) -> None:
    """Raises `pytest.UsageError` if a short run would replace what a full run has measured."""
    if is_short(config) and results_folder(config) == COMMITTED:
        raise pytest.UsageError("a short run must not replace the committed results: leave out --short or --results")


def is_short(config: pytest.Config) -> bool:
    return config.getoption("--short")


def results_folder(config: pytest.Config) -> Path:
    """As an absolute path; a relative one is meant from where pytest was started."""
    return (config.invocation_params.dir / config.getoption("--results")).resolve()


def left_out(path: Path, config: pytest.Config) -> bool:
    """Whether a run has no place for this file: without ``--all`` a folder stands for its main job only.

    Files that are named on the command line run in any case.
    """
    if config.getoption("all_suites") or path.name == MAIN_JOB.name or not path.name.startswith("test_"):
        return False
    named = (config.invocation_params.dir / argument.split("::")[0] for argument in config.args)
    return path.resolve() not in [given.resolve() for given in named]


def shown(path: Path) -> str:
    """The path as a user in the current folder would write it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
