"""One run of pytest for each kind of devices: the same arguments, both outputs, and the worst exit status."""

import pytest

import kinds
import stand_in
from processes import Ahead, run_pytest

# Their processes are their own: once is enough.
pytestmark = pytest.mark.devices("cpu")

TESTS = """
import os
import pytest

def test_passes(request):
    print("kind:", request.config.getoption("--devices"))

def test_fails_on_sim(request):
    assert request.config.getoption("--devices") == "cpu"

def test_fails_on_cpu(request):
    assert request.config.getoption("--devices") == "sim"

def test_ends_on_sim(request):
    if request.config.getoption("--devices") == "sim":
        os.abort()

@pytest.mark.devices("sim")
def test_is_for_sim():
    print("for sim")

@pytest.mark.devices("none")
def test_is_for_none():
    print("for none")

def test_waits(request, tmp_path):
    import pathlib, time
    pathlib.Path(request.config.getoption("--devices")).touch()
    time.sleep(60)
"""


def project(folder):
    (folder / "conftest.py").write_text('pytest_plugins = ["company", "kinds"]\n')
    (folder / "test_kinds.py").write_text(TESTS)
    return folder


@pytest.fixture(scope="module")
def processes(request, tmp_path_factory):
    def run(*arguments):
        return run_pytest(project(tmp_path_factory.mktemp("project")), *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    with Ahead(request, tmp_path_factory.mktemp("ahead"), run) as ahead:
        yield ahead


@pytest.mark.ahead("-k", "passes", "-s")
def test_each_kind_runs_once_with_these_arguments_and_the_first_is_shown_first(result):
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        ["*kind: cpu*", "*1 passed, 6 des*", "*kind: sim*", "*1 passed, 6 des*", "*=cpu: passed", "*=sim: passed"]
    )
    assert str(result.stdout).count("kind: ") == 2


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("*=cpu: exit status 1", marks=pytest.mark.ahead("-k", "passes or fails_on_cpu"), id="cpu"),
        pytest.param(
            "*=sim: exit status 1",
            marks=[pytest.mark.ahead("-k", "passes or fails_on_sim"), pytest.mark.long],
            id="sim",
        ),
    ],
)
def test_a_failure_of_either_kind_is_one_of_the_run(result, words):
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([words])


@pytest.mark.parametrize(
    ("kind", "on_stand_in", "expected"),
    [("sim", False, True), ("cuda", True, True), ("cuda", False, False), ("cpu", False, False)],
)
def test_clocks_are_on_simulated_devices_and_a_stand_in(monkeypatch, pytestconfig, kind, on_stand_in, expected):
    """A GPU has none, so tests that need them are skipped there."""
    monkeypatch.setattr(pytestconfig.option, "devices", kind)
    monkeypatch.setattr(stand_in, "is_stand_in", lambda: on_stand_in)
    assert stand_in.fits(pytest.mark.devices("sim", "stand-in").mark, pytestconfig) == expected


@pytest.mark.parametrize(("statuses", "expected"), [([0, 0], 0), ([0, 1], 1), ([2, 1], 2), ([5, 0], 0), ([5, 5], 5)])
def test_the_worst_status(statuses, expected):
    assert kinds.worst(statuses) == expected
