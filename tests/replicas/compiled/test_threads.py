"""Threads that call compiled wrappers at once get right results, first calls included, and the interpreter survives."""

import pytest

from processes import run_script

ROUNDS = 200
SCRIPT = "import sys, compiled_at_once; compiled_at_once.main(sys.argv[1], int(sys.argv[2]))"


@pytest.mark.long
@pytest.mark.watchdog(700)
@pytest.mark.devices("cpu", "sim")
def test_six_threads_call_at_once(request: pytest.FixtureRequest):
    printed = run_script(SCRIPT, request.config.getoption("--devices"), str(ROUNDS), timeout=600)
    right, graphs = map(int, printed.split())
    assert right == ROUNDS * 6 * 3
    assert graphs > 0
