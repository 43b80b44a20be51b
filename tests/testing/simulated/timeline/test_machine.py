"""A machine is described completely, or an error says what is missing."""

import math
import pickle

import pytest

from dataparallel.testing.simulated.timeline import HOST, Host, Machine, Path, Wiring
from hand_made import machine, wired

pytestmark = pytest.mark.devices("cpu")  # no device takes part: once is enough


class TestHost:
    @pytest.mark.parametrize("name", ["lock", "rest", "backward", "measured"])
    @pytest.mark.parametrize("value", [-1e-6, math.inf, math.nan])
    def test_a_cost_is_finite_and_not_negative(self, name, value):
        with pytest.raises(ValueError, match=rf"Host\.{name} is 0 or more, and finite; got"):
            Host(**{name: value})

    @pytest.mark.parametrize("value", ["3e-6", True])
    def test_a_cost_is_a_number(self, value):
        with pytest.raises(TypeError, match=r"Host\.rest is a number; got"):
            Host(rest=value)


class TestPath:
    @pytest.mark.parametrize("bandwidth", [0, -1, math.nan])
    def test_a_bandwidth_is_more_than_0(self, bandwidth):
        with pytest.raises(ValueError, match=r"Path\.bandwidth is more than 0"):
            Path(bandwidth, 0, ())

    def test_a_latency_is_not_negative(self):
        with pytest.raises(ValueError, match=r"Path\.latency is 0 or more"):
            Path(1, -1, ())

    def test_links_are_a_tuple_of_names(self):
        with pytest.raises(TypeError, match=r"Path\.links is a tuple of names; got '0 out'"):
            Path(1, 0, "0 out")

    def test_a_link_is_occupied_once(self):
        with pytest.raises(ValueError, match="occupies a link once"):
            Path(1, 0, ("0 out", "0 out"))


class TestWiring:
    def test_every_pair_of_places_has_a_path(self):
        paths = dict(wired(2).paths)
        del paths[0, 1]
        with pytest.raises(ValueError, match="no path from 0 to 1"):
            Wiring(wired(2).links, paths)

    def test_the_host_is_a_place(self):
        paths = dict(wired(2).paths)
        del paths[HOST, 1]
        with pytest.raises(ValueError, match="no path from -1 to 1; -1 is the host"):
            Wiring(wired(2).links, paths)

    @pytest.mark.parametrize("ends", [(0, 0), (-2, 0)])
    def test_a_path_leads_from_a_place_to_another(self, ends):
        with pytest.raises(ValueError, match="a path leads from a device, or -1 for the host, to another place"):
            Wiring(wired(2).links, {**wired(2).paths, ends: Path(1, 0, ())})

    def test_a_path_names_links_that_exist(self):
        with pytest.raises(ValueError, match=r"from 0 to 1: no links named \['tunnel'\]"):
            Wiring(wired(2).links, {**wired(2).paths, (0, 1): Path(1, 0, ("tunnel",))})

    def test_a_path_is_a_path(self):
        with pytest.raises(TypeError, match="from 0 to 1: this takes a Path; got 5"):
            Wiring(wired(2).links, {**wired(2).paths, (0, 1): 5})

    @pytest.mark.parametrize(("capacity", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
    def test_a_link_serves_a_whole_number_of_copies(self, capacity, error):
        with pytest.raises(error, match=r"link '0 out': .*; got"):
            Wiring({**wired(2).links, "0 out": capacity}, wired(2).paths)

    def test_what_the_caller_does_to_its_dictionaries_changes_nothing(self):
        links = dict(wired(2).links)
        wiring = Wiring(links, wired(2).paths)
        links.clear()
        assert wiring.links == wired(2).links


class TestMachine:
    def test_it_has_a_device(self):
        with pytest.raises(ValueError, match="1 or more devices; got 0"):
            machine(0, wired(1))

    def test_a_number_of_devices_is_an_int(self):
        with pytest.raises(TypeError, match=r"Machine\.devices is a number of devices, an int; got 2\.0"):
            machine(2.0, wired(2))

    def test_its_wiring_is_for_as_many_devices(self):
        with pytest.raises(ValueError, match="hand-made has 3 devices, its wiring 2"):
            machine(3, wired(2))

    @pytest.mark.parametrize(
        ("rates", "error", "problem"),
        [
            ({"flops": {"float32": 0}}, ValueError, r"Machine\.flops\['float32'\] is more than 0; got 0"),
            ({"flops": 1e12}, TypeError, r"Machine\.flops has a rate for each dtype, .*; got 1"),
            ({"memory_bandwidth": 0}, ValueError, r"Machine\.memory_bandwidth is more than 0; got 0"),
            ({"kernel_latency": -1}, ValueError, r"Machine\.kernel_latency is 0 or more, and finite; got -1"),
            ({"host": 5e-6}, TypeError, r"Machine\.host is a Host; got 5e-06"),
            ({"wiring": {1: 2}}, TypeError, r"Machine\.wiring is a Wiring; got \{1: 2\}"),
        ],
    )
    def test_its_rates_make_sense(self, rates, error, problem):
        with pytest.raises(error, match=problem):
            machine(2, **rates)

    def test_it_can_be_had_with_other_attributes(self):
        slow, quick = machine(2), machine(2).with_(kernel_latency=0.5, name="quick")
        assert (slow.kernel_latency, quick.kernel_latency, quick.name) == (0, 0.5, "quick")
        assert quick.wiring == slow.wiring

    def test_an_unknown_attribute_is_an_error(self):
        with pytest.raises(TypeError, match=r"a Machine has no \['latency'\]; it has \['name', 'devices'"):
            machine(2).with_(latency=0)

    def test_other_attributes_are_checked_too(self):
        with pytest.raises(ValueError, match=r"Machine\.memory_bandwidth"):
            machine(2).with_(memory_bandwidth=-1)

    def test_it_can_be_sent_to_another_process(self):
        original = machine(3)
        sent = pickle.loads(pickle.dumps(original))
        assert isinstance(sent, Machine)
        assert sent == original
