"""The published machines: what is known of each by name, and that all of them could exist."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from nogpu.timeline import HOST, Machine
from nogpu.timeline.presets import (
    A100,
    A100_80,
    H100,
    PRESETS,
    RTX_3090,
    TITAN_RTX,
    TITAN_RTX_PCIE,
    V100,
)

# The published peaks: number of devices, float32 TFLOP/s, memory in GB/s, the fastest link in GB/s for one direction.
PEAKS = {
    V100.name: (8, 15.7, 900, 50),
    A100.name: (8, 156, 1555, 300),
    A100_80.name: (8, 156, 2039, 300),
    H100.name: (8, 494.5, 3350, 450),
    RTX_3090.name: (4, 35.6, 936, 31.5),
    TITAN_RTX.name: (2, 16.3, 672, 50),
    TITAN_RTX_PCIE.name: (2, 16.3, 672, 15.75),
}

each_machine = pytest.mark.parametrize("machine", PRESETS, ids=lambda machine: machine.name)


class TestEachMachine:
    @each_machine
    def test_reaches_40_to_100_percent_of_what_is_published(self, machine: Machine) -> None:
        devices, tera, memory, link = PEAKS[machine.name]
        fastest = max(path.bandwidth for ends, path in machine.wiring.paths.items() if HOST not in ends)
        assert machine.devices == devices
        assert 0.4 < machine.flops["float32"] / (tera * 1e12) < 1
        assert 0.4 < machine.memory_bandwidth / (memory * 1e9) < 1
        assert 0.4 < fastest / (link * 1e9) < 1

    @each_machine
    def test_has_links_that_are_used_and_alike_in_both_directions(self, machine: Machine) -> None:
        paths = machine.wiring.paths
        assert paths.keys() == {*permutations([HOST, *range(machine.devices)], 2)}
        assert all(path.links for path in paths.values())
        assert {link for path in paths.values() for link in path.links} == {*machine.wiring.links}
        for a, b in combinations([HOST, *range(machine.devices)], 2):
            assert (paths[a, b].bandwidth, paths[a, b].latency) == (paths[b, a].bandwidth, paths[b, a].latency)
            assert not {*paths[a, b].links} & {*paths[b, a].links}  # it sends while it receives


@pytest.mark.parametrize("device", range(8))
def test_in_the_cube_mesh_of_a_dgx_1_six_links_lead_from_a_device_to_four_others(device: int) -> None:
    paths = {other: V100.wiring.paths[device, other] for other in range(8) if other != device}
    links = [path.bandwidth / (47.9e9 / 2) for other, path in paths.items() if f"{device} to {other}" in path.links]
    assert sorted(links) == pytest.approx([1, 1, 2, 2])
