"""Graphs that are small enough to schedule by hand. One FLOP and one byte take one second, see `hand_made`."""

from dataclasses import replace

import pytest

from dataparallel.testing.simulated.timeline import Host, Machine, Path, Schedule, Wiring, schedule
from dataparallel.testing.simulated.timeline.wiring import mesh, through_host, tree
from hand_made import Program, machine, wired

pytestmark = pytest.mark.devices("cpu")  # no device takes part: once is enough


def run(program: Program, on: Machine | None = None) -> Schedule:
    recording = program.recording()
    devices = [stream.device for stream in recording.streams]
    devices += [place for launch in recording.launches for place in launch.copy or ()]
    return schedule(recording, on or machine(1 + max(devices, default=0)))


def times(result: Schedule) -> list[tuple[float, float]]:
    return [*zip(result.start, result.end, strict=True)]


class TestKernels:
    def test_an_empty_recording_takes_no_time(self):
        result = run(Program())
        assert (result.time, result.critical_path, result.waits, result.overlap) == (0, [], [], 100)

    def test_a_kernel_takes_the_latency_and_the_longer_of_computing_and_memory(self):
        program = Program()
        program.kernel((0, 0), 12, bytes_read=4, bytes_written=4)
        program.kernel((0, 0), 12, bytes_read=40, bytes_written=20)
        program.kernel((0, 0), 0, bytes_read=8, dtype="int64")
        result = run(program, machine(1, flops={"float32": 4}, memory_bandwidth=2, kernel_latency=1))
        assert times(result) == [(0, 5), (5, 36), (36, 41)]

    def test_a_kernel_computes_at_the_rate_of_its_dtype(self):
        program = Program()
        program.kernel((0, 0), 12)
        program.kernel((0, 0), 12, dtype="bfloat16")
        assert run(program, machine(1, flops={"float32": 1, "bfloat16": 4})).time == 15

    def test_a_stream_runs_in_order(self):
        program = Program()
        for seconds in (1, 2, 3):
            program.kernel((0, 0), seconds)
        assert times(run(program)) == [(0, 1), (1, 3), (3, 6)]

    def test_streams_of_one_device_overlap(self):
        program = Program()
        program.kernel((0, 0), 5)
        program.kernel((0, 1), 3)
        result = run(program)
        assert times(result) == [(0, 5), (0, 3)]
        assert [busy.kernels for busy in result.streams] == [5, 3]
        assert result.devices[0].kernels == 5

    def test_an_event_orders_two_streams(self):
        program = Program()
        first = program.kernel((0, 0), 5)
        program.kernel((0, 1), 3)
        program.kernel((0, 1), 1, after=[first])
        program.kernel((0, 0), 1)
        assert times(run(program)) == [(0, 5), (0, 3), (5, 6), (5, 6)]

    def test_a_wait_for_what_has_ended_costs_nothing(self):
        program = Program()
        first = program.kernel((0, 0), 2)
        program.kernel((0, 1), 3)
        program.kernel((0, 1), 1, after=[first])
        result = run(program)
        assert times(result)[-1] == (3, 4)
        assert result.waits == []

    def test_a_diamond_ends_with_its_longer_side(self):
        program = Program()
        top = program.kernel((0, 0), 1)
        left = program.kernel((0, 1), 2, after=[top])
        right = program.kernel((0, 2), 4, after=[top])
        program.kernel((0, 0), 1, after=[left, right])
        result = run(program)
        assert times(result) == [(0, 1), (1, 3), (1, 5), (5, 6)]
        assert [step.launch for step in result.critical_path] == [top, right, 3]


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

    def test_the_target_computes_when_the_copy_has_ended(self):
        program = Program()
        program.kernel((0, 0), 1)
        program.kernel((1, 0), 4)
        program.copy((0, 0), 1, 2, current=(1, 0))
        program.kernel((1, 0), 1)
        program.kernel((0, 0), 1)
        assert times(run(program)) == [(0, 1), (0, 4), (4, 6), (6, 7), (6, 7)]

    def test_a_device_sends_one_copy_at_a_time(self):
        program = Program()
        program.copy((0, 1), 1, 2)
        program.copy((0, 2), 2, 3)
        assert times(run(program, machine(3))) == [(0, 2), (2, 5)]

    def test_a_device_receives_one_copy_at_a_time(self):
        program = Program()
        program.copy((0, 0), 2, 2)
        program.copy((1, 0), 2, 3)
        assert times(run(program, machine(3))) == [(0, 2), (2, 5)]

    def test_a_device_sends_while_it_receives(self):
        program = Program()
        program.copy((0, 0), 1, 2)
        program.copy((1, 0), 0, 3)
        assert times(run(program)) == [(0, 2), (0, 3)]

    def test_a_copy_does_not_occupy_the_device(self):
        program = Program()
        program.kernel((0, 0), 4)
        program.copy((0, 1), 1, 3)
        result = run(program)
        assert times(result) == [(0, 4), (0, 3)]
        assert [(device.kernels, device.copies) for device in result.devices] == [(4, 3), (0, 3)]

    def test_links_serve_copies_in_the_order_of_the_host(self):
        program = Program()
        first = program.kernel((0, 0), 5)
        program.copy((0, 1), 1, 1, after=[first])
        program.copy((0, 2), 1, 1)
        assert times(run(program))[1:] == [(5, 6), (6, 7)]

    def test_a_link_of_capacity_two(self):
        program = Program()
        for stream, seconds in enumerate((4, 1, 2, 1)):
            program.copy((0, stream), 1, seconds)
        assert times(run(program, machine(2, wired(2, capacity=2)))) == [(0, 4), (0, 1), (1, 3), (3, 4)]

    def test_the_host_sends_to_all_devices_at_once(self):
        program = Program()
        program.from_host((0, 0), 2)
        program.from_host((1, 0), 3)
        program.to_host((0, 1), 4)
        program.to_host((0, 2), 1)
        assert times(run(program)) == [(0, 2), (0, 3), (0, 4), (4, 5)]


def broadcast_along_a_chain(devices: int, pieces: int, has_streams: bool) -> Program:
    """Device by device and piece by piece; with a stream for receiving and one for sending, or with one for both."""
    program = Program()
    arrived: dict[tuple[int, int], int] = {}
    for step in range(devices - 2 + pieces):
        for piece in range(pieces):
            device = step - piece
            if 0 <= device < devices - 1:
                before = [arrived[device, piece]] if device else []
                out, into = ((device, 1), (device + 1, 2)) if has_streams else ((device, 0), (device + 1, 0))
                arrived[device + 1, piece] = program.copy(out, device + 1, 1, current=into, after=before)
    return program


class TestRoutes:
    def test_a_star_sends_one_after_the_other(self):
        program = Program()
        for device in (1, 2, 3):
            program.copy((0, device), device, 2, current=(device, 0))
        assert run(program).time == 6

    def test_a_sum_by_a_star_arrives_one_after_the_other(self):
        program = Program()
        for device in (1, 2, 3):
            program.copy((device, 0), 0, 2, current=(0, 0))
            program.kernel((0, 0), 1)
        # With one stream the root adds before it receives the next.
        assert run(program).time == 9

    @pytest.mark.parametrize(("devices", "pieces"), [(3, 1), (3, 2), (4, 3), (8, 3)])
    def test_a_chain_with_streams_for_sending_and_receiving(self, devices, pieces):
        assert run(broadcast_along_a_chain(devices, pieces, has_streams=True)).time == devices - 2 + pieces

    @pytest.mark.parametrize(("devices", "pieces", "seconds"), [(3, 1, 2), (3, 2, 4), (4, 3, 7), (8, 3, 11)])
    def test_a_chain_on_one_stream_per_device_sends_or_receives(self, devices, pieces, seconds):
        # A piece follows the one before at a distance of two copies: devices - 1 + 2 (pieces - 1).
        assert run(broadcast_along_a_chain(devices, pieces, has_streams=False)).time == seconds

    def test_all_to_all_takes_as_long_as_a_port_is_busy(self):
        program = Program()
        for distance in (1, 2, 3):
            for device in range(4):
                program.copy((device, 1), (device + distance) % 4, 2, current=((device + distance) % 4, 2))
        result = run(program)
        assert result.time == 6
        assert {result.links[f"{device} {way}"] for device in range(4) for way in ("in", "out")} == {6}


class TestWiring:
    def test_a_group_of_a_pcie_tree_sends_one_copy_to_another_at_a_time(self):
        program = Program()
        program.copy((0, 0), 2, 2)
        program.copy((1, 0), 3, 3)
        program.copy((2, 0), 3, 1)  # within a group: only the link down to 3 is occupied
        on = machine(4, tree([[0, 1], [2, 3]], bandwidth=1, latency=0, uplink=1))
        assert times(run(program, on)) == [(0, 2), (2, 5), (5, 6)]

    def test_groups_of_a_pcie_tree_do_not_disturb_each_other(self):
        program = Program()
        for source, target in ((0, 1), (1, 0), (2, 3), (3, 2)):
            program.copy((source, 0), target, 2)
        assert run(program, machine(4, tree([[0, 1], [2, 3]], bandwidth=1, latency=0, uplink=1))).time == 2

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


class TestHost:
    def test_a_chain_of_short_kernels_is_bound_by_the_host(self):
        program = Program()
        for _ in range(4):
            program.kernel((0, 0), 2)
        result = run(program, machine(1, host=Host(3, 4, 5)))
        assert result.issue == [0, 7, 14, 21]
        assert times(result) == [(7, 9), (14, 16), (21, 23), (28, 30)]
        assert [step.on for step in result.critical_path] == ["host"] * 4 + ["device"]
        assert result.host_idle == 2

    def test_threads_take_turns_with_the_lock(self):
        program = Program()
        for _ in range(2):
            for thread in (0, 1, 2):
                program.kernel((0, thread), 1, thread=thread)
        result = run(program, machine(1, host=Host(3, 4, 5)))
        # A thread is free again after 7 seconds, but the lock only after 9.
        assert result.issue == [0, 3, 6, 9, 12, 15]
        assert result.time == 23
        assert [thread.for_others for thread in result.threads] == [2, 2, 2]

    def test_two_threads_wait_for_themselves_not_for_the_lock(self):
        program = Program()
        for _ in range(2):
            for thread in (0, 1):
                program.kernel((0, thread), 1, thread=thread)
        assert run(program, machine(1, host=Host(3, 4, 5))).issue == [0, 3, 7, 10]

    def test_threads_of_a_backward_pass_hold_no_lock(self):
        program = Program()
        for _ in range(2):
            program.kernel((0, 0), 1)
            for thread in (1, 2, 3):
                program.kernel((0, thread), 1, thread=thread, in_backward=True)
        assert run(program, machine(1, host=Host(3, 4, 5))).issue == [0, 0, 0, 0, 7, 5, 5, 5]

    def test_a_host_wait_holds_up_what_its_thread_issues(self):
        program = Program()
        first = program.kernel((0, 0), 10)
        program.kernel((0, 0), 1, host_waits=(first,))
        result = run(program, machine(1, host=Host(1, 1, 5)))
        assert result.issue == [0, 12]
        assert times(result) == [(2, 12), (14, 15)]
        (thread,) = result.threads
        assert (thread.seconds, thread.for_devices, thread.for_others, thread.idle) == (4, 10, 0, 1)

    def test_a_host_wait_holds_up_no_other_thread_that_is_before_it_in_the_host_order(self):
        program = Program()
        first = program.kernel((0, 0), 10)
        program.kernel((0, 1), 1, thread=1)
        program.kernel((0, 0), 1, host_waits=(first,))
        assert run(program, machine(1, host=Host(1, 1, 5))).issue == [0, 1, 12]

    def test_a_thread_waits_for_a_launch_that_another_has_not_issued_yet(self):
        program = Program()
        program.kernel((0, 0), 1)
        second = program.kernel((0, 0), 1)
        program.kernel((0, 1), 1, thread=1, host_waits=(second,))
        result = run(program, machine(1, host=Host(3, 4, 5)))
        assert result.issue == [0, 7, 15]
        assert times(result)[1:] == [(14, 15), (22, 23)]

    def test_a_started_thread_issues_after_the_launch_that_was_before_its_start(self):
        program = Program()
        program.kernel((0, 0), 1)
        before = program.kernel((0, 0), 1)
        program.kernel((0, 1), 1, thread=1, in_backward=True, issued_after=(before,))
        assert run(program, machine(1, host=Host(3, 4, 5))).issue == [0, 7, 7]

    def test_a_stream_waits_for_a_launch_that_another_thread_has_not_issued_yet(self):
        program = Program()
        program.kernel((0, 0), 1)
        second = program.kernel((0, 0), 1)
        program.kernel((0, 1), 1, thread=1, in_backward=True, after=[second])
        result = run(program, machine(1, host=Host(3, 4, 5)))
        assert result.issue == [0, 7, 7]
        assert times(result)[2] == (15, 16)

    def test_a_stream_of_two_threads_is_issued_in_its_order(self):
        program = Program()
        program.kernel((0, 1), 1)
        program.kernel((0, 0), 1)
        program.kernel((0, 0), 1, thread=1, in_backward=True)
        result = run(program, machine(1, host=Host(3, 4, 1)))
        assert result.issue == [0, 7, 7]
        assert times(result)[1:] == [(14, 15), (15, 16)]

    def test_measured_times_are_scaled_and_all_under_the_lock(self):
        program = Program()
        program.kernel((0, 0), 1, host_seconds=2.0)
        program.kernel((0, 1), 1, thread=1, host_seconds=3.0)
        program.kernel((0, 2), 1, thread=2, host_seconds=4.0, in_backward=True)
        result = run(program, machine(1, host=Host(measured=0.5)))
        assert result.issue == [0, 1, 0]
        assert times(result) == [(1, 2), (2.5, 3.5), (2, 3)]

    def test_a_free_host_costs_nothing(self):
        program = Program()
        for _ in range(4):
            program.kernel((0, 0), 2)
        slow = machine(1, host=Host(3, 4, 5))
        assert run(program, slow.with_free_host()).time == 8
        assert slow.with_free_host().host == Host.free() != slow.host


class TestExposedCommunication:
    def test_a_copy_beside_a_kernel_is_hidden(self):
        program = Program()
        program.kernel((0, 0), 4)
        copy = program.copy((0, 1), 1, 3)
        program.kernel((1, 0), 1, after=[copy])
        result = run(program)
        assert (result.time, result.communication, result.exposed_communication, result.overlap) == (4, 3, 0, 100)

    def test_a_copy_that_everything_waits_for_is_exposed(self):
        program = Program()
        program.kernel((0, 0), 4)
        program.copy((0, 0), 1, 3, current=(1, 0))
        program.kernel((1, 0), 1)
        result = run(program)
        assert (result.time, result.communication, result.exposed_communication, result.overlap) == (8, 3, 3, 0)

    def test_a_copy_is_hidden_in_part(self):
        program = Program()
        program.kernel((1, 0), 1)
        copy = program.copy((0, 0), 1, 4)
        program.kernel((1, 0), 1, after=[copy])
        result = run(program)
        assert (result.time, result.exposed_communication, result.overlap) == (5, 3, 25)

    def test_a_copy_within_a_device_is_no_communication(self):
        program = Program()
        program.kernel((0, 0), 4, op="aten::copy_")
        result = run(program)
        assert (result.communication, result.exposed_communication) == (0, 0)

    def test_the_host_costs_the_same_without_copies(self):
        program = Program()
        for _ in range(3):
            program.copy((0, 0), 1, 2)
        # Issued after 5, 10 and 15 seconds; only the last one lasts longer than the host.
        assert run(program, machine(2, host=Host(5, 0, 0))).exposed_communication == 2

    def test_waiting_for_a_turn_is_exposed_but_never_more_than_all(self):
        program = Program()
        first = program.kernel((0, 0), 10)
        program.copy((0, 1), 1, 1, after=[first])
        copy = program.copy((0, 2), 1, 1)
        program.kernel((1, 0), 10, after=[copy])
        result = run(program)
        assert (result.time, result.exposed_communication, result.overlap) == (22, 12, 0)


class TestWaits:
    def test_a_wait_is_charged_to_the_launch_that_ends_last(self):
        program = Program()
        short = program.kernel((0, 1), 3, op="aten::relu")
        long = program.kernel((0, 2), 5, op="aten::addmm")
        program.kernel((0, 0), 1)
        program.kernel((0, 0), 1, after=[short, long])
        (wait,) = run(program).waits
        assert (wait.launch, wait.waited_for, wait.link, wait.seconds) == (3, long, "", 4)

    def test_time_on_the_host_is_not_charged_to_a_wait(self):
        program = Program()
        first = program.kernel((0, 1), 9)
        program.kernel((0, 0), 1, after=[first])
        (wait,) = run(program, machine(1, host=Host(2, 0, 0))).waits
        assert wait.seconds == 11 - 4

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

    def test_the_largest_come_first(self):
        program = Program()
        for stream, seconds in ((1, 2), (2, 7), (3, 4)):
            kernel = program.kernel((0, 10 + stream), seconds)
            program.kernel((0, stream), 1, after=[kernel])
        assert [wait.seconds for wait in run(program).waits] == [7, 4, 2]
        assert [wait.seconds for wait in run(program).grouped_waits] == [7, 4, 2]


class TestTheCriticalPath:
    def test_it_names_launches_and_what_bound_them(self):
        program = Program()
        program.kernel((0, 0), 2)
        program.copy((0, 0), 1, 3, current=(1, 0))
        program.kernel((1, 0), 1)
        program.kernel((1, 0), 1)
        steps = run(program, machine(2, host=Host(0.5, 0, 0))).critical_path
        assert [(step.launch, step.on, step.bound.kind) for step in steps] == [
            (0, "host", "begin"),
            (0, "device", "host"),
            (1, "device", "stream"),
            (2, "device", "wait"),
            (3, "device", "stream"),
        ]
        assert [step.seconds for step in steps] == [0.5, 2, 3, 1, 1]

    def test_it_goes_through_a_link(self):
        program = Program()
        program.copy((0, 0), 2, 2)
        program.copy((1, 0), 2, 3)
        steps = run(program, machine(3)).critical_path
        assert [(step.launch, step.bound.kind, step.bound.link) for step in steps] == [
            (0, "host", ""),
            (1, "link", "2 in"),
        ]

    def test_it_goes_through_a_host_wait_and_the_lock(self):
        program = Program()
        first = program.kernel((0, 0), 4)
        program.kernel((0, 0), 1, host_waits=(first,))
        program.kernel((0, 1), 9, thread=1, issued_after=(first,))
        program.kernel((0, 2), 9, thread=2, issued_after=(1,))
        steps = run(program, machine(1, host=Host(3, 4, 5))).critical_path
        assert [(step.launch, step.on, step.bound.kind, step.seconds) for step in steps] == [
            (0, "host", "begin", 7),
            (0, "device", "host", 4),
            (1, "host", "host wait", 3),
            (3, "host", "lock", 7),
            (3, "device", "host", 9),
        ]


class TestErrors:
    def test_a_machine_with_too_few_devices(self):
        program = Program()
        program.kernel((4, 0))
        with pytest.raises(ValueError, match=r"uses device 4, but hand-made has 2: .* 5 devices or more"):
            schedule(program.recording(), machine(2))

    def test_a_copy_to_a_device_that_is_not_there(self):
        program = Program()
        program.copy((0, 0), 2)
        with pytest.raises(ValueError, match=r"launch 0 \(aten::_copy_from\) copies from 0 to 2; .* devices 0 to 1"):
            schedule(program.recording(), machine(2))

    def test_a_dtype_without_a_rate(self):
        program = Program()
        program.kernel((0, 0), dtype="float64")
        with pytest.raises(ValueError, match=r"float64, but hand-made has rates for \['float32'\] only"):
            run(program)

    @pytest.mark.parametrize("name", ["waits", "host_waits", "issued_after"])
    def test_a_launch_that_waits_for_a_later_one(self, name):
        program = Program()
        program.kernel((0, 0))
        program.launches[0] = replace(program.launches[0], **{name: (0,)})
        with pytest.raises(ValueError, match=rf"launch 0 \(aten::mm\) has \[0\] among its {name}"):
            run(program)

    def test_a_launch_with_another_number(self):
        program = Program()
        program.kernel((0, 0))
        program.launches[0] = replace(program.launches[0], index=1)
        with pytest.raises(ValueError, match=r"launch 0 .* has index 1"):
            run(program)

    def test_a_launch_on_a_stream_that_is_not_there(self):
        program = Program()
        program.kernel((0, 0))
        program.launches[0] = replace(program.launches[0], stream=1)
        with pytest.raises(ValueError, match=r"launch 0 .* names stream 1; the recording has 1"):
            run(program)
