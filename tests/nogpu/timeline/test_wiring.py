"""Links and paths of common machines. `test_schedule_copies` has what copies do on them."""

import pytest

from nogpu.timeline import HOST
from nogpu.timeline.wiring import mesh, switch, through_host, tree

pytestmark = pytest.mark.devices("cpu")  # no device takes part: once is enough


def test_a_switch_joins_a_port_out_and_a_port_in():
    wiring = switch(3, bandwidth=4, latency=1, host_bandwidth=2, host_latency=3, copies=2)
    path = wiring.paths[0, 2]
    assert (path.bandwidth, path.latency, path.links) == (4, 1, ("0 out", "2 in"))
    path = wiring.paths[HOST, 2]
    assert (path.bandwidth, path.latency, path.links) == (2, 3, ("host to 2",))
    assert (wiring.links["0 out"], wiring.links["host to 2"]) == (2, 1)


def test_one_device_has_only_the_host():
    for wiring in (
        switch(1, bandwidth=1, latency=0, host_bandwidth=1, host_latency=0),
        tree([[0]], bandwidth=1, latency=0, uplink=1),
        through_host(1, bandwidth=1, latency=0),
    ):
        assert wiring.devices == 1
        assert wiring.paths.keys() == {(0, HOST), (HOST, 0)}


def test_a_mesh_has_a_link_for_each_direction_of_a_pair():
    hosted = through_host(3, bandwidth=1, latency=2)
    wiring = mesh({(0, 1): 25, (1, 2): 50}, hosted, latency=0, engines=2)
    assert wiring.paths[1, 0].links == ("1 sends", "1 to 0", "0 receives")
    assert [wiring.paths[ends].bandwidth for ends in ((0, 1), (1, 0), (2, 1))] == [25, 25, 50]
    assert wiring.paths[0, 2] == hosted.paths[0, 2]
    assert wiring.paths[0, HOST] == hosted.paths[0, HOST]


@pytest.mark.parametrize("pair", [(0, 3), (0, 0), (0, HOST)])
def test_a_mesh_joins_devices(pair):
    with pytest.raises(ValueError, match="pairs are of devices 0 to 2; got"):
        mesh({pair: 1}, through_host(3, bandwidth=1, latency=0), latency=0, engines=1)


def test_a_pair_of_a_mesh_is_given_once():
    with pytest.raises(ValueError, match="given twice"):
        mesh({(0, 1): 1, (1, 0): 1}, through_host(2, bandwidth=1, latency=0), latency=0, engines=1)


def test_a_tree_goes_through_the_host_between_groups():
    wiring = tree([[0, 1], [2, 3]], bandwidth=4, latency=1, uplink=3)
    assert (wiring.paths[0, 1].bandwidth, wiring.paths[0, 1].links) == (4, ("0 up", "1 down"))
    crossing = ("1 up", "switch 0 up", "switch 1 down", "2 down")
    assert (wiring.paths[1, 2].bandwidth, wiring.paths[1, 2].links) == (3, crossing)
    assert wiring.paths[HOST, 3].links == ("switch 1 down", "3 down")


@pytest.mark.parametrize("groups", [[[0, 1], [1, 2]], [[0], [2]]])
def test_each_device_of_a_tree_is_in_one_group(groups):
    with pytest.raises(ValueError, match="each of the devices 0, 1, 2 and so on is in one group"):
        tree(groups, bandwidth=1, latency=0, uplink=1)


def test_what_goes_through_the_host_takes_both_ways():
    wiring = through_host(2, bandwidth=4, latency=1, copies=3)
    path = wiring.paths[0, 1]
    assert (path.bandwidth, path.latency, path.links) == (4, 2, ("0 to host", "host to 1", "host"))
    assert wiring.links["host"] == 3
