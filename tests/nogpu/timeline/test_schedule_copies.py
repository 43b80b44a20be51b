"""Copies that are few enough to schedule by hand: on links, along routes, and on machines of several wirings.

One FLOP and one byte take one second, see `hand_made`.
"""

import pytest

from hand_made import Program, machine, run, times, wired
from nogpu.timeline import Path, Wiring
from nogpu.timeline.wiring import mesh, through_host, tree

pytestmark = pytest.mark.devices("cpu")  # no device takes part: once is enough


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
