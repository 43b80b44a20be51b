"""Graphs that are small enough to schedule by hand. One FLOP and one byte take one second, see `hand_made`.

Here are kernels, the host that launches them, copies on machines of several wirings, and what is refused.
`test_schedule_results` has what a schedule tells.
"""

from dataclasses import replace

import pytest

from hand_made import Program, machine, run, times, wired
from nogpu.timeline import Host, Path, Wiring, schedule
from nogpu.timeline.wiring import mesh, through_host, tree

pytestmark = pytest.mark.devices("cpu")  # no device takes part: once is enough


class TestKernels:
    @pytest.mark.smoke
    def test_a_kernel_takes_the_latency_and_the_longer_of_computing_and_memory(self):
        program = Program()
        program.kernel((0, 0), 12, bytes_read=4, bytes_written=4)
        program.kernel((0, 0), 12, bytes_read=40, bytes_written=20)
        program.kernel((0, 0), 0, bytes_read=8, dtype="int64")
        program.kernel((0, 0), 12, dtype="bfloat16")
        result = run(program, machine(1, flops={"float32": 4, "bfloat16": 6}, memory_bandwidth=2, kernel_latency=1))
        assert times(result) == [(0, 5), (5, 36), (36, 41), (41, 44)]


class TestHost:
    @pytest.mark.parametrize("in_backward", [False, True])
    def test_a_graph_is_one_call(self, in_backward):
        program = Program()
        for _ in range(3):
            program.kernel((0, 0), 2, graph=0, in_backward=in_backward)
        program.kernel((0, 1), 1, thread=1)
        program.kernel((0, 0), 1)
        result = run(program, machine(1, host=Host(3, 4, 5, graph=10)))
        locked = 0 if in_backward else 3
        begins = 10 + locked
        assert result.issue == [0, begins, begins, locked, begins]
        assert result.start == [begins, begins + 2, begins + 4, locked + 7, begins + 7]
        assert [thread.launches for thread in result.threads] == [2, 1]

    def test_a_host_wait_holds_up_what_its_thread_issues(self):
        program = Program()
        first = program.kernel((0, 0), 10)
        program.kernel((0, 0), 1, host_waits=(first,))
        result = run(program, machine(1, host=Host(1, 1, 5)))
        assert result.issue == [0, 12]
        assert times(result) == [(2, 12), (14, 15)]
        (thread,) = result.threads
        assert (thread.seconds, thread.for_devices, thread.for_others, thread.idle) == (4, 10, 0, 1)
        assert result.host_idle == 11

    def test_measured_times_are_scaled_and_all_under_the_lock(self):
        program = Program()
        program.kernel((0, 0), 1, host_seconds=2.0)
        program.kernel((0, 1), 1, thread=1, host_seconds=3.0)
        program.kernel((0, 2), 1, thread=2, host_seconds=4.0, in_backward=True)
        result = run(program, machine(1, host=Host(measured=0.5)))
        assert result.issue == [0, 1, 0]
        assert times(result) == [(1, 2), (2.5, 3.5), (2, 3)]


class TestCopies:
    def test_a_copy_takes_the_latency_and_the_time_of_its_bytes(self):
        program = Program()
        program.copy((0, 0), 1, 12)
        paths = {ends: Path(4, 2, path.links) for ends, path in wired(2).paths.items()}
        assert run(program, machine(2, Wiring(wired(2).links, paths))).time == 5

    def test_an_item_sends_what_it_reads(self):
        program = Program()
        program.to_host((0, 0), bytes_read=4, bytes_written=0)
        assert run(program).time == 4

    def test_the_host_sends_to_all_devices_at_once(self):
        program = Program()
        program.from_host((0, 0), 2)
        program.from_host((1, 0), 3)
        program.to_host((0, 1), 4)
        program.to_host((0, 2), 1)
        assert times(run(program)) == [(0, 2), (0, 3), (0, 4), (4, 5)]


class TestWiring:
    def test_a_group_of_a_pcie_tree_sends_one_copy_to_another_at_a_time(self):
        program = Program()
        program.copy((0, 0), 2, 2)
        program.copy((1, 0), 3, 3)
        program.copy((2, 0), 3, 1)  # within a group: only the link down to 3 is occupied
        on = machine(4, tree([[0, 1], [2, 3]], bandwidth=1, latency=0, uplink=1))
        assert times(run(program, on)) == [(0, 2), (2, 5), (5, 6)]

    def test_a_narrow_uplink_holds_up_what_crosses_it(self):
        program = Program()
        program.copy((0, 0), 1, 4)
        program.copy((0, 0), 2, 4)
        program.from_host((3, 0), 4)
        on = machine(4, tree([[0, 1], [2, 3]], bandwidth=2, latency=0, uplink=1))
        # The copy from the host needs the link down of the switch, which the copy to device 2 occupies.
        assert times(run(program, on)) == [(0, 2), (2, 6), (6, 10)]

    def test_a_mesh_goes_another_way_where_there_is_no_link(self):
        program = Program()
        program.copy((0, 0), 1, 12)
        program.copy((0, 1), 3, 12)
        on = machine(4, mesh({(0, 1): 4}, through_host(4, bandwidth=2, latency=1), latency=0, engines=2))
        assert times(run(program, on)) == [(0, 3), (0, 8)]

    def test_a_device_of_a_mesh_sends_as_many_copies_as_it_has_engines(self):
        program = Program()
        for target in (1, 2, 3):
            program.copy((0, target), target, 1)
        pairs = dict.fromkeys([(0, 1), (0, 2), (0, 3)], 1)
        for engines, seconds in ((1, 3), (2, 2), (3, 1)):
            wiring = mesh(pairs, through_host(4, bandwidth=1, latency=0), latency=0, engines=engines)
            assert run(program, machine(4, wiring)).time == seconds

    def test_copies_through_the_host_share_its_memory(self):
        program = Program()
        program.copy((0, 0), 1, 2)
        program.copy((2, 0), 3, 2)
        for copies, seconds in ((None, 2), (1, 4), (2, 2)):
            assert run(program, machine(4, through_host(4, bandwidth=1, latency=0, copies=copies))).time == seconds


class TestErrors:
    @pytest.mark.parametrize("fields", [{"graph": 1}, {"graph": 5}, {"graph": -1}, {"graph": 0, "thread": 1}])
    def test_a_graph_that_does_not_begin_before(self, fields):
        program = Program()
        program.kernel((0, 0), graph=0)
        program.kernel((0, 0))
        program.kernel((0, 0), **fields)
        with pytest.raises(
            ValueError, match=r"launch 2 \(aten::mm\) is in the graph of launch -?\d, which does not begin"
        ):
            schedule(program.recording(), machine(1))

    @pytest.mark.parametrize(
        ("add", "message"),
        [
            (lambda program: program.kernel((4, 0)), r"uses device 4, but hand-made has 2: .* 5 devices or more"),
            (
                lambda program: program.copy((0, 0), 2),
                r"launch 0 \(aten::_copy_from\) copies from 0 to 2; .* devices 0 to 1",
            ),
            (
                lambda program: program.kernel((0, 0), dtype="float64"),
                r"float64, but hand-made has rates for \['float32'\] only",
            ),
        ],
    )
    def test_a_machine_without_the_device_or_the_rate(self, add, message):
        program = Program()
        add(program)
        with pytest.raises(ValueError, match=message):
            schedule(program.recording(), machine(2))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"waits": (0,)}, r"launch 0 \(aten::mm\) has \[0\] among its waits"),
            ({"host_waits": (0,)}, r"launch 0 \(aten::mm\) has \[0\] among its host_waits"),
            ({"issued_after": (0,)}, r"launch 0 \(aten::mm\) has \[0\] among its issued_after"),
            ({"index": 1}, "launch 0 .* has index 1"),
            ({"stream": 1}, "launch 0 .* names stream 1; the recording has 1"),
        ],
    )
    def test_a_launch_that_cannot_be(self, change, message):
        program = Program()
        program.kernel((0, 0))
        program.launches[0] = replace(program.launches[0], **change)
        with pytest.raises(ValueError, match=message):
            run(program)
