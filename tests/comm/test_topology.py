"""What is said to lie between devices, who is asked about it, and how often.

CUDA and NVML are played by three answers each; that real ones give such answers needs CUDA.
"""

import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from dataparallel.comm import topology
from dataparallel.comm.topology import Link, Topology, of
from processes import run_script

CPU = torch.device("cpu")
CUDA = [torch.device("cuda", index) for index in range(4)]


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    topology.forget()
    yield
    topology.forget()


class Gpus:
    """Four GPUs: the first two linked by NVLink, the third by PCIe, the fourth by nothing."""

    def __init__(self) -> None:
        self.asked: list[frozenset[int]] = []
        self.nvlinks = {frozenset({0, 1})}

    def can_access(self, one: torch.device, other: torch.device) -> bool:
        self.asked.append(frozenset({one.index, other.index}))
        return 3 not in (one.index, other.index)


class NVMLError(Exception):
    pass


def fake_nvml(gpus: Gpus) -> types.ModuleType:
    """Its indices are not CUDA's: only UUIDs lead to the right GPU."""

    def status(one: int, other: int, caps: int) -> int:
        assert caps == 2, "the index of NVLink"
        return 0 if frozenset({one, other}) in gpus.nvlinks else 5

    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid.removeprefix("GPU-uuid"))
    nvml.nvmlDeviceGetP2PStatus = status
    return nvml


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", gpus.can_access)
    properties = lambda device: types.SimpleNamespace(uuid=f"uuid{device.index}")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(gpus))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "pynvml" or find_spec(name))
    return gpus


def kinds(found: Topology) -> dict[tuple[int, int], str]:
    return {pair: link.name for pair, link in found.links.items()}


def test_one_device_has_no_links() -> None:
    found = of([CPU])
    assert (found.devices, dict(found.links)) == ((CPU,), {})
    assert (found.distinct, found.slowest) == ((CPU,), Link.SAME)


def test_cpu_slots_share_one_memory() -> None:
    found = of([CPU, torch.device("cpu", 0), CPU])
    assert set(kinds(found).values()) == {"SAME"}
    assert len(found.links) == 6
    assert found.distinct == (CPU,)


@pytest.mark.devices("sim")
def test_simulated_devices_are_peers() -> None:
    devices = [torch.device("sim", index) for index in (2, 0, 1)]
    found = of(devices)
    assert found.devices == found.distinct == tuple(devices)
    assert kinds(found) == dict.fromkeys(itertools.permutations(range(3), 2), "PEER")


def test_an_accelerator_that_torch_has_no_question_for_is_a_peer() -> None:
    assert kinds(of([torch.device("xpu", 0), torch.device("xpu", 1)])) == {(0, 1): "PEER", (1, 0): "PEER"}


def test_the_cpu_and_an_accelerator_meet_in_host_memory() -> None:
    found = of([torch.device("xpu", 0), CPU])
    assert found.slowest is Link.HOST
    assert found.without_peer_access == (torch.device("xpu", 0), CPU)


def test_nvlink_pcie_and_none(gpus: Gpus) -> None:
    found = kinds(of(CUDA))
    assert {pair for pair, name in found.items() if name == "NVLINK"} == {(0, 1), (1, 0)}
    assert {pair for pair, name in found.items() if name == "HOST"} == {p for p in found if 3 in p}
    assert {pair for pair, name in found.items() if name == "PEER"} == {(0, 2), (2, 0), (1, 2), (2, 1)}


def test_the_slowest_link_counts(gpus: Gpus) -> None:
    assert of(CUDA[:2]).slowest is Link.NVLINK
    assert of(CUDA[:3]).slowest is Link.PEER
    assert of(CUDA).slowest is Link.HOST
    assert of(CUDA[:3]).without_peer_access is None
    assert of(CUDA).without_peer_access == (CUDA[0], CUDA[3])


def test_a_device_listed_twice_is_one(gpus: Gpus) -> None:
    found = of([CUDA[1], CUDA[0], CUDA[1]])
    assert found.devices == (CUDA[1], CUDA[0], CUDA[1])
    assert found.distinct == (CUDA[1], CUDA[0])
    assert found.links[0, 2] is found.links[2, 0] is Link.SAME


def test_peer_access_in_one_direction_is_none(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one.index < other.index)
    assert set(kinds(of(CUDA[:2])).values()) == {"HOST"}


def test_only_the_devices_of_the_call_are_asked_about_and_once(gpus: Gpus) -> None:
    of([CUDA[0], CUDA[2]])
    assert set(gpus.asked) == {frozenset({0, 2})}
    before = len(gpus.asked)
    assert of([CUDA[0], CUDA[2]]) is of((CUDA[0], CUDA[2]))
    of([CUDA[2], CUDA[0]])
    assert len(gpus.asked) == before


def test_without_pynvml_nvlink_is_not_known(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert of(CUDA[:2]).slowest is Link.PEER


def test_what_nvml_cannot_say_is_no_nvlink(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise NVMLError("not supported")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetP2PStatus", fails)
    assert of(CUDA[:2]).slowest is Link.PEER


def test_nvml_is_not_asked_about_other_makers_gpus(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert of(CUDA[:2]).slowest is Link.PEER


@pytest.mark.long
@pytest.mark.devices("cpu")  # its processes are its own: once is enough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_asks_again() -> None:
    run_script("""
import os, warnings
import torch
from dataparallel.comm.topology import of
warnings.simplefilter("ignore")
devices = [torch.device("xpu", index) for index in range(2)]
before = of(devices)
assert of(devices) is before
child = os.fork()
if child == 0:
    os._exit(0 if of(devices) is not before else 1)
assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 0
assert of(devices) is before
""")


@pytest.mark.devices("cuda")
def test_real_devices_have_an_answer(slots: list) -> None:
    """Needs CUDA."""
    found = of(slots)
    for (one, other), link in found.links.items():
        assert (link is Link.SAME) == (slots[one] == slots[other])
