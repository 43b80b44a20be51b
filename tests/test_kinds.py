"""One run of pytest for each kind of devices: the same arguments, both outputs, and the worst exit status."""

import pytest

import kinds
import stand_in
from processes import Ahead, run_pytest

# Their processes are their own: once is enough.
pytestmark = pytest.mark.devices("cpu")

TESTS = """
def test_passes(request):
    print("kind:", request.config.getoption("--devices"))

def test_fails_on_sim(request):
    assert request.config.getoption("--devices") == "cpu"

def test_fails_on_cpu(request):
    assert request.config.getoption("--devices") == "sim"
"""


@pytest.fixture(scope="module")
def processes(request, tmp_path_factory):
    def run(*arguments):
        folder = tmp_path_factory.mktemp("project")
        (folder / "conftest.py").write_text('pytest_plugins = ["company", "kinds"]\n')
        (folder / "test_kinds.py").write_text(TESTS)
        return run_pytest(folder, *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    with Ahead(request, tmp_path_factory.mktemp("ahead"), run) as ahead:
        yield ahead


@pytest.mark.ahead("-k", "passes", "-s")
def test_each_kind_runs_once_with_these_arguments_and_the_first_is_shown_first(result):
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        ["*kind: cpu*", "*1 passed, 2 des*", "*kind: sim*", "*1 passed, 2 des*", "*=cpu: passed", "*=sim: passed"]
    )
    assert str(result.stdout).count("kind: ") == 2


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.ahead("-k", f"passes or fails_on_{kind}")) for kind in ("cpu", "sim")],
)
def test_a_failure_of_either_kind_is_one_of_the_run(result, kind):
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"*={kind}: exit status 1"])


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
