"""One run of pytest for each kind of devices: the same arguments, both outputs, and the worst exit status."""

import signal
import subprocess
import sys
import time

import pytest
import torch

import kinds
import stand_in
from company import ROOM
from processes import Ahead, run_pytest
from selection import others_long

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


@pytest.mark.ahead("-k", "passes", "-s", "--devices=sim")
def test_a_kind_that_is_named_runs_alone(result):
    result.assert_outcomes(passed=1, deselected=6)
    assert str(result.stdout).count("kind: ") == 1


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


@pytest.mark.ahead("--junitxml=report.xml")
def test_one_report_of_two_processes_is_refused(result):
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --junitxml is for one process: say which with --devices=*"])


@pytest.mark.long
@pytest.mark.parametrize("number", others_long([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_every_process_and_shows_what_they_say(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "waits"],
        cwd=project(tmp_path),
        env=run_pytest(tmp_path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1").variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not ((tmp_path / "cpu").exists() and (tmp_path / "sim").exists()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    try:
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == (pytest.ExitCode.INTERRUPTED if number == signal.SIGINT else 128 + number), output
    assert output.count("! KeyboardInterrupt !") == (2 if number == signal.SIGINT else 0)


@pytest.mark.parametrize(
    ("gpu", "has_one", "why_not", "expected"),
    [
        (False, False, None, True),
        (True, False, None, False),
        (False, True, None, False),
        (False, False, "torch has no CUDA", False),
    ],
)
def test_cuda_devices_are_a_stand_ins_where_there_is_no_gpu(monkeypatch, pytestconfig, gpu, has_one, why_not, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(kinds, "is_stand_in", lambda: has_one)
    monkeypatch.setattr(kinds, "why_not_here", lambda: why_not)
    assert kinds.needs_stand_in() == expected
    # That function decides how a process with the kind is started. Other kinds have nothing to do with it.
    assert ("nogpu.cuda" in kinds._command(pytestconfig, "cuda")) == expected
    assert "nogpu.cuda" not in kinds._command(pytestconfig, "sim")


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


@pytest.mark.long
def test_a_test_alone_waits_for_those_of_the_other_kind(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["company"]\n')
    (tmp_path / "test_alone.py").write_text("""
import time, pytest

def run():
    with open("order", "a", buffering=1) as order:
        order.write("begin\\n")
        time.sleep(0.3)
        order.write("end\\n")

@pytest.mark.alone
def test_alone():
    run()

def test_in_company():
    run()
""")
    variables = {**run_pytest(tmp_path).variables(), ROOM: str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    running = [
        subprocess.Popen([*command, f"test_alone.py::{which}"], cwd=tmp_path, env=variables, stdout=subprocess.PIPE)
        for which in ("test_alone", "test_in_company")
    ]
    for process in running:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert (tmp_path / "order").read_text().split() == ["begin", "end"] * 2
