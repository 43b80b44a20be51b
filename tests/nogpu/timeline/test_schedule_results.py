"""What a schedule tells: communication that nothing hides, what waits for what, and the critical path.

The graphs are small enough to schedule by hand. One FLOP and one byte take one second, see `hand_made`.
"""

import pytest

from hand_made import Program, machine, run
from nogpu.timeline import Host

pytestmark = pytest.mark.devices("cpu")  # no device takes part: once is enough


class TestExposedCommunication:
    def test_a_copy_is_hidden_in_part(self):
        program = Program()
        program.kernel((1, 0), 1)
        copy = program.copy((0, 0), 1, 4)
        program.kernel((1, 0), 1, after=[copy])
        result = run(program)
        assert (result.time, result.exposed_communication, result.overlap) == (5, 3, 25)

    def test_the_host_costs_the_same_without_copies(self):
        program = Program()
        for _ in range(3):
            program.copy((0, 0), 1, 2)
        # Issued after 5, 10 and 15 seconds; only the last one lasts longer than the host.
        assert run(program, machine(2, host=Host(5, 0, 0))).exposed_communication == 2


class TestWaits:
    def test_a_wait_is_charged_to_the_launch_that_ends_last(self):
        program = Program()
        short = program.kernel((0, 1), 3, op="aten::relu")
        long = program.kernel((0, 2), 5, op="aten::addmm")
        program.kernel((0, 0), 1)
        program.kernel((0, 0), 1, after=[short, long])
        (wait,) = run(program).waits
        assert (wait.launch, wait.waited_for, wait.link, wait.seconds) == (3, long, "", 4)

    def test_a_wait_and_a_link_are_charged_apart(self):
        program = Program()
        gradient = program.kernel((0, 0), 2)
        program.copy((1, 0), 2, 5)
        program.copy((0, 1), 2, 1, after=[gradient])
        first, second = run(program, machine(3)).waits
        assert (first.launch, first.waited_for, first.link, first.seconds) == (2, 1, "2 in", 3)
        assert (second.launch, second.waited_for, second.link, second.seconds) == (2, gradient, "", 2)

    def test_waits_of_the_same_operators_and_streams_are_summed(self):
        program = Program()
        for _ in range(3):
            kernel = program.kernel((0, 0), 2, op="aten::addmm")
            program.kernel((0, 1), 1, op="aten::relu", after=[kernel])
        (wait,) = program_waits = run(program).grouped_waits
        assert len(program_waits) == 1
        assert (wait.op, wait.for_op, wait.count, wait.seconds) == ("aten::relu", "aten::addmm", 3, 2 + 1 + 1)


def test_the_critical_path_goes_through_host_waits_the_lock_streams_and_waits():
    program = Program()
    first = program.kernel((0, 0), 4)
    program.kernel((0, 0), 1, host_waits=(first,))
    program.kernel((0, 1), 9, thread=1, issued_after=(first,))
    program.copy((0, 2), 1, 9, thread=2, issued_after=(1,), current=(1, 0))
    for _ in range(2):
        program.kernel((1, 0), 30, thread=2)
    steps = run(program, machine(2, host=Host(3, 4, 5))).critical_path
    assert [(step.launch, step.on, step.bound.kind, step.seconds) for step in steps] == [
        (0, "host", "begin", 7),
        (0, "device", "host", 4),
        (1, "host", "host wait", 3),
        (3, "host", "lock", 7),
        (3, "device", "host", 9),
        (4, "device", "wait", 30),
        (5, "device", "stream", 30),
    ]
