"""Random programs of torch: none that is right raises, and every one raises that lacks a wait that it needs.

`random_programs` makes them, and `run_random` runs them in a process of its own. What each computes is compared with
the same operators one after the other on the CPU.
"""

import json
import subprocess
import sys

import pytest

from processes import environment
from random_programs import generate, is_ordered, with_one_wait_left_out
from stand_in import needs_stand_in

pytestmark = pytest.mark.devices("cpu")  # the programs run in processes of their own


def outcome(first: int, count: int, *schedule: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "run_random", str(first), str(count), *schedule],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_programs_are_ordered_and_need_their_waits():
    for seed in range(20):
        program = generate(seed)
        assert is_ordered(program)
        assert with_one_wait_left_out(program, seed) is not None


@needs_stand_in
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 50), *(pytest.param(first, 250, marks=pytest.mark.long) for first in range(1000, 2000, 250))],
)
def test_no_false_alarm_the_right_values_and_every_missing_wait_found(first, count):
    found = outcome(first, count)
    assert found["false_alarms"] == []
    assert found["wrong"] == []
    assert found["missed"] == []
    assert found["found"] >= 0.95 * count


@needs_stand_in
@pytest.mark.parametrize(("first", "count"), [(0, 50), pytest.param(3000, 500, marks=pytest.mark.long)])
def test_the_same_as_late_as_possible_where_values_show_missing_waits_too(first, count):
    found = outcome(first, count, "late")
    assert found["false_alarms"] == []
    assert found["wrong"] == []
    assert found["missed"] == []
    assert found["found"] >= 0.95 * count
    assert found["shown"] >= 0.4 * count
