"""A machine is described completely, or an error says what is missing."""

import math
import pickle

import pytest

from hand_made import machine, wired
from nogpu.timeline import HOST, Host, Machine, Path, Wiring
from nogpu.timeline.wiring import mesh, through_host, tree

pytestmark = pytest.mark.devices("cpu")  # no device takes part: once is enough


def paths(*, without=None, **changes) -> dict:
    """The paths of two devices. ``without`` is left out; ``to_1`` replaces the one from device 0 to device 1."""
    found = {ends: path for ends, path in wired(2).paths.items() if ends != without}
    return found | ({(0, 1): changes["to_1"]} if changes else {})


def joined(paths: dict, **links) -> Wiring:
    return Wiring({**wired(2).links, **links}, paths)


def meshed(*pairs: tuple[int, int]) -> Wiring:
    return mesh(dict.fromkeys(pairs, 1), through_host(3, bandwidth=1, latency=0), latency=0, engines=1)


def grouped(*groups: list[int]) -> Wiring:
    return tree(groups, bandwidth=1, latency=0, uplink=1)


REFUSED = [
    *((lambda n=n, v=v: Host(**{n: v}), rf"Host\.{n} is 0 or more, and finite; got")
      for n in ("lock", "rest", "backward", "measured", "graph") for v in (-1e-6, math.inf, math.nan)),
    (lambda: Host(cores=0), r"Host\.cores is 1 or more; got 0"),
    *((lambda v=v: Path(v, 0, ()), r"Path\.bandwidth is more than 0") for v in (0, -1, math.nan)),
    (lambda: Path(1, -1, ()), r"Path\.latency is 0 or more"),
    (lambda: Path(1, 0, ("0 out", "0 out")), "occupies a link once"),
    (lambda: joined(paths(without=(0, 1))), "no path from 0 to 1"),
    (lambda: joined(paths(without=(HOST, 1))), "no path from -1 to 1; -1 is the host"),
    *((lambda e=e: joined({**paths(), e: Path(1, 0, ())}), "a path leads from a device, or -1 for the host, to another")
      for e in ((0, 0), (-2, 0))),
    (lambda: joined(paths(to_1=Path(1, 0, ("tunnel",)))), r"from 0 to 1: no links named \['tunnel'\]"),
    (lambda: joined(paths(), **{"0 out": 0}), "link '0 out': .*; got"),
    (lambda: machine(0, wired(1)), "1 or more devices; got 0"),
    (lambda: machine(3, wired(2)), "hand-made has 3 devices, its wiring 2"),
    (lambda: machine(flops={"float32": 0}), r"Machine\.flops\['float32'\] is more than 0; got 0"),
    (lambda: machine(memory_bandwidth=0), r"Machine\.memory_bandwidth is more than 0; got 0"),
    (lambda: machine(kernel_latency=-1), r"Machine\.kernel_latency is 0 or more, and finite; got -1"),
    (lambda: machine().with_(memory_bandwidth=-1), r"Machine\.memory_bandwidth"),
    *((lambda pair=pair: meshed(pair), "pairs are of devices 0 to 2; got") for pair in ((0, 3), (0, 0), (0, HOST))),
    (lambda: meshed((0, 1), (1, 0)), "given twice"),
    *((lambda groups=groups: grouped(*groups), "each of the devices 0, 1, 2 and so on is in one group")
      for groups in (([0, 1], [1, 2]), ([0], [2]))),
]  # fmt: skip
OF_ANOTHER_TYPE = [
    (lambda: Host(rest="3e-6"), r"Host\.rest is a number; got"),
    (lambda: Host().without_lock(cores=2.0), r"Host\.cores is a number of cores, an int; got 2\.0"),
    (lambda: Host(cores=True), r"Host\.cores is a number of cores, an int; got True"),
    (lambda: Host(rest=True), r"Host\.rest is a number; got"),
    (lambda: Path(1, 0, "0 out"), r"Path\.links is a tuple of names; got '0 out'"),
    (lambda: joined(paths(to_1=5)), "from 0 to 1: this takes a Path; got 5"),
    (lambda: joined(paths(), **{"0 out": 1.5}), "link '0 out': .*; got"),
    (lambda: joined(paths(), **{"0 out": True}), "link '0 out': .*; got"),
    (lambda: machine(2.0, wired(2)), r"Machine\.devices is a number of devices, an int; got 2\.0"),
    (lambda: machine(flops=1e12), r"Machine\.flops has a rate for each dtype, .*; got 1"),
    (lambda: machine().with_(host=5e-6), r"Machine\.host is a Host; got 5e-06"),
    (lambda: machine().with_(wiring={1: 2}), r"Machine\.wiring is a Wiring; got \{1: 2\}"),
    (lambda: machine().with_(latency=0), r"a Machine has no \['latency'\]; it has \['name', 'devices'"),
]


@pytest.mark.parametrize(
    ("error", "make", "message"),
    [*((ValueError, *case) for case in REFUSED), *((TypeError, *case) for case in OF_ANOTHER_TYPE)],
)
def test_what_cannot_be_is_refused_with_a_sentence(error, make, message):
    with pytest.raises(error, match=message):
        make()


def test_a_machine_can_be_had_with_other_attributes():
    slow, quick = machine(2), machine(2).with_(kernel_latency=0.5, name="quick")
    assert (slow.kernel_latency, quick.kernel_latency, quick.name) == (0, 0.5, "quick")
    assert quick.wiring == slow.wiring


def test_it_can_be_sent_to_another_process():
    original = machine(3)
    sent = pickle.loads(pickle.dumps(original))
    assert isinstance(sent, Machine)
    assert sent == original
