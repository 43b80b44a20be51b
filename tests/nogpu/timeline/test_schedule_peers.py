"""Kernels that read other devices' memory, few enough to schedule by hand.

One FLOP and one byte take one second, see `hand_made`.
"""

from dataclasses import replace

import pytest

from hand_made import Program, machine, run, times, wired
from nogpu.timeline import Host, Wiring, schedule
from nogpu.timeline.presets import PRESETS, RTX_3090

pytestmark = pytest.mark.devices("cpu")  # no device takes part: once is enough


class TestOneKernel:
    def test_reads_one_peer_after_the_other(self):
        program = Program()
        program.pull((0, 0), {1: 2, 2: 3, 3: 4})
        result = run(program)
        assert [(move.ends, move.start, move.end) for move in result.solution.moves] == [
            ((1, 0), 0, 2),
            ((2, 0), 2, 5),
            ((3, 0), 5, 9),
        ]
        busy = {link: seconds for link, seconds in result.links.items() if seconds}
        assert busy == {"0 in": 9, "1 out": 2, "2 out": 3, "3 out": 4}
        assert [(device.kernels, device.copies) for device in result.devices] == [(0, 9), (0, 2), (0, 3), (0, 4)]

    def test_gets_a_share_of_the_bandwidth_of_copies(self):
        program = Program()
        program.pull((0, 0), {1: 3})
        program.copy((2, 0), 3, 3)
        assert times(run(program, machine(4, peer_kernels=0.5))) == [(0, 6), (0, 3)]

    def test_begins_as_a_copy_does_and_costs_the_host_as_much_as_a_graph(self):
        program = Program()
        program.pull((0, 0), {1: 3, 2: 1})
        paths = {ends: replace(path, latency=2) for ends, path in wired(3).paths.items()}
        on = machine(3, Wiring(wired(3).links, paths), Host(lock=1, rest=5, graph=10))
        assert times(run(program, on)) == [(11, 17)]

    def test_takes_no_less_than_its_own_memory_does(self):
        program = Program()
        program.pull((0, 0), {1: 3}, bytes_read=2, bytes_written=5)
        assert run(program, machine(2, memory_bandwidth=1)).time == 7
        assert run(program, machine(2, memory_bandwidth=7)).time == 3

    def test_writes_to_its_peers_too(self):
        program = Program()
        program.pull((0, 0), {}, peers=((0, 1, 2), (0, 2, 2)))
        program.copy((2, 0), 1, 1)  # the port into device 1 is free after two seconds
        assert times(run(program)) == [(0, 4), (2, 3)]


class TestPorts:
    @pytest.mark.parametrize("devices", [2, 4, 8])
    def test_readers_that_begin_with_different_peers_do_not_wait(self, devices):
        program = Program()
        for device in range(devices):
            program.pull((device, 0), {(device + step) % devices: 2 for step in range(1, devices)})
        assert times(run(program)) == [(0, 2 * (devices - 1))] * devices

    def test_readers_of_one_device_share_its_port(self):
        program = Program()
        for device in (1, 2, 3):
            program.pull((device, 0), {0: 2})
        assert times(run(program)) == [(0, 2), (0, 4), (0, 6)]

    def test_a_kernel_and_a_copy_share_a_port(self):
        program = Program()
        program.copy((1, 0), 0, 3)
        program.pull((0, 1), {2: 2, 3: 2})
        result = run(program)
        assert times(result) == [(0, 3), (0, 7)]
        assert result.communication == 7


class TestBeside:
    """Computing takes half as long again while the device reads its peers."""

    on = machine(3, beside_peer_kernels=0.5)

    def test_computing_is_slowed_while_the_kernel_runs(self):
        program = Program()
        program.pull((0, 1), {1: 3})
        program.kernel((0, 0), 6)  # two of its six seconds are done when the other kernel ends
        program.kernel((1, 0), 6)
        assert times(run(program, self.on)) == [(0, 3), (0, 7), (0, 6)]

    def test_computing_that_was_launched_before_is_slowed_too(self):
        program = Program()
        first = program.kernel((0, 0), 1)
        program.kernel((0, 0), 4)
        program.pull((0, 1), {1: 3}, after=[first])
        program.kernel((0, 0), 1)
        assert times(run(program, self.on)) == [(0, 1), (1, 6), (1, 4), (6, 7)]

    def test_without_communication_nothing_is_slowed(self):
        program = Program()
        program.pull((0, 1), {1: 3})
        program.kernel((0, 0), 6)
        assert run(program, self.on).exposed_communication == 1


def test_what_is_shown(tmp_path):
    program = Program()
    program.pull((0, 0), {1: 3})
    result = run(program)
    result.save(tmp_path / "step.json")
    assert "1 launches, 0 of them copies between two places, 1 of them kernels with peers" in result.summary()
    assert '"peers": "[[1, 0, 3]]"' in (tmp_path / "step.json").read_text()


def test_a_kernel_reads_no_device_that_is_no_peer():
    program = Program()
    program.pull((0, 0), {3: 3})
    with pytest.raises(ValueError, match=r"launch 0 \(pull\) moves bytes from 3 to 0 by a kernel on device 0"):
        run(program, RTX_3090)


def test_which_devices_of_the_presets_are_peers():
    """All of a switch, those with a link of a cube mesh, and none that meet at the host."""
    peers = {
        on.name: sum(path.for_kernels for ends, path in on.wiring.paths.items() if -1 not in ends) for on in PRESETS
    }
    assert peers == {
        "8 x V100": 2 * 16,
        "8 x A100": 56,
        "8 x A100 80 GB": 56,
        "8 x H100": 56,
        "4 x RTX 3090": 0,
        "2 x TITAN RTX, NVLink": 2,
        "2 x TITAN RTX, PCIe": 0,
    }


def test_a_kernel_on_a_third_device_is_refused():
    program = Program()
    program.pull((0, 0), {}, peers=((1, 2, 3),))
    with pytest.raises(ValueError, match="one end has to be that device"):
        schedule(program.recording(), machine(3))
