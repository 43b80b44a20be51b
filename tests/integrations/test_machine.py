"""The description says what the machine has, touches no device, and ends with what to do next."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from dataparallel import comm
from dataparallel.comm import kernels, nccl
from dataparallel.integrations import machine
from processes import run_script

pytestmark = pytest.mark.devices("cpu")  # no device takes part


def test_it_has_a_line_for_each_fact_and_ends_with_what_to_do_next(monkeypatch):
    monkeypatch.setattr(machine, "all_devices", lambda: [])
    monkeypatch.setattr(
        machine, "about_gpus", lambda: [("NVML", "asked"), ("  GPU 0", "an H100"), ("  GPU 1", "another")]
    )
    text = machine.description()
    for line in ("dataparallel ", "torch ", "NVML          asked\n  GPU 0       an H100", "NCCL ", "CuPy "):
        assert f"\n{line}" in "\n" + text
    assert "accelerator   none\n" in text
    assert "\ntensors " not in text  # nothing has to travel
    _, what_next = text.split("\nwhat to do next\n")
    for words in ("dataparallel.trace()", "simulate(4)", "docs/coming_from.rst"):
        assert words in what_next


def test_it_says_if_peers_are_checked(monkeypatch):
    assert "tried with random data before its first use" in machine.description()
    monkeypatch.setenv("DATAPARALLEL_PEER_CHECK", "0")
    assert "peer check    off, by DATAPARALLEL_PEER_CHECK" in machine.description()


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        ([], 'DataParallel(model, device_ids=["cpu", "cpu"])'),
        (["cuda:0"], "DataParallel(model, device_ids=[0, 0])"),
        (["xpu:0", "xpu:1"], 'DataParallel(model.to("xpu"))'),
    ],
)
def test_what_to_do_next_depends_on_the_devices(devices, line):
    assert line in str(machine.next_steps([*map(torch.device, devices)]))


GPUS = [torch.device("cuda", index) for index in range(2)]


@pytest.fixture
def installed(monkeypatch):
    """NCCL and CuPy, which must not be imported for a description."""

    def imported():
        raise AssertionError("CuPy was imported")

    monkeypatch.setattr(nccl, "why_not", lambda: None)
    monkeypatch.setattr(kernels, "why_not", imported)
    monkeypatch.setattr(kernels, "why_not", lambda devices: None)
    comm.transport_choice.forget()
    yield
    comm.transport_choice.forget()


def carried(devices=GPUS):
    """By the tensors: the transport, the route and why."""
    return {name.strip(): row for name, *row in machine.carriers(devices)}


def test_everything_that_travels_has_a_transport_a_route_and_a_reason(installed):
    """A small bucket goes along a star, a large one along a chain."""
    found = carried([torch.device("cuda", index) for index in range(8)])
    assert [*found] == [
        "batch",
        "weights 64 KiB",
        "weights 25 MiB",
        "gradients 64 KiB",
        "gradients 25 MiB",
        "outputs",
    ]
    assert found["weights 64 KiB"] == ["copy", "star", "less than 1 MiB"]
    assert found["gradients 25 MiB"][:2] == ["copy", "chain"]


@pytest.mark.parametrize(
    ("name", "ways", "words"),
    [
        ("nccl", ["copy", "nccl", "nccl", "copy", "copy", "copy"], "deterministic=False"),
        ("cupy", ["copy", "cupy", "cupy", "cupy", "cupy", "copy"], "has no gather"),
        ("host", ["host"] * 6, "it was asked for"),
    ],
)
def test_a_transport_that_is_asked_for_is_said_of_each(name, ways, words, installed, monkeypatch):
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", name)
    found = carried()
    assert [way for way, *_ in found.values()] == ways
    assert words in str(found)


def test_a_refusal_is_a_row_too(installed, monkeypatch):
    monkeypatch.setattr(kernels, "why_not", lambda devices: "CuPy is not installed")
    with comm.using(transport="cupy"):
        found = carried()
    assert found["weights 25 MiB"][0] == "refused"
    assert "CuPy is not installed" in found["weights 25 MiB"][2]
    assert "falls back to plain copies" in found["outputs"][2]


def test_an_unknown_transport_is_said_too(monkeypatch):
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "pigeon")
    assert {way for way, *_ in carried().values()} == {"refused"}
    assert "pigeon" in carried()["batch"][2]


def test_the_command_describes_the_machine_and_touches_no_device():
    program = (
        "import runpy, sys, torch\n"
        "runpy.run_module('dataparallel', run_name='__main__')\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'cupy' not in sys.modules\n"
    )
    text = run_script(program)
    assert text.startswith("dataparallel  ")
    assert "\nwhat to do next\n" in text


GIB = 2**30


class FakeNvml:
    """pynvml with invented GPUs; handles are UUIDs."""

    class NVMLError(Exception):
        pass

    # As nvidia-ml-py has it: a stray comma makes a tuple, which NVML's functions refuse.
    NVML_P2P_CAPS_INDEX_READ = (0,)

    def __init__(self, names, p2p=0, nvlink=1):
        self.nvlink = nvlink
        self.gpus = {f"GPU-{i}{i}-{name}": name for i, name in enumerate(names)}
        self.p2p = p2p
        self.users = 0

    def nvmlInit(self):
        self.users += 1

    def nvmlShutdown(self):
        self.users -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return list(self.gpus)[index]

    def nvmlDeviceGetName(self, handle):
        return self.gpus[handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        index = list(self.gpus).index(handle)
        return SimpleNamespace(total=80 * GIB, used=(index + 1) * GIB, free=(79 - index) * GIB)

    def nvmlDeviceGetP2PStatus(self, one, other, capability):
        assert capability in (0, 1, 2)
        assert one != other
        if capability == 2:
            return self.nvlink
        return self.p2p[capability] if isinstance(self.p2p, tuple) else self.p2p


class Broken(FakeNvml):
    """Raises NVML's error from one function."""

    def __init__(self, function):
        super().__init__(["A", "B"])

        def fail(*args):
            raise self.NVMLError("GPU is lost")

        setattr(self, function, fail)


@pytest.mark.parametrize(("visible", "shown"), [(None, "not set"), ("1,0", "'1,0'"), ("", "''")])
def test_all_gpus_are_listed_whatever_cuda_shows(visible, shown):
    fake = FakeNvml(["H", "L"])
    (_, head), *gpus = machine.ask_nvml(fake, visible)
    assert fake.users == 0
    assert head.endswith(f"CUDA_VISIBLE_DEVICES is {shown}")
    assert gpus == [
        ("  GPU 0", "H, memory 80.0 GiB, 79.0 GiB free, peers 1"),
        ("  GPU 1", "L, memory 80.0 GiB, 78.0 GiB free, peers 0"),
    ]


@pytest.mark.parametrize(
    ("p2p", "nvlink", "peers"),
    [(0, 1, "1 2"), (0, 0, "1 2, NVLink to 1 2"), (1, 1, "none"), ((0, 4), 1, "none"), ((4, 0), 1, "none")],
)
def test_peers_can_read_and_write(p2p, nvlink, peers):
    _, (_, first), *_ = machine.ask_nvml(FakeNvml(["H", "H", "H"], p2p, nvlink), None)
    assert first.endswith(f", peers {peers}")


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_broken_nvml_is_a_line_of_the_description(function):
    broken = Broken(function)
    assert machine.ask_nvml(broken, None) == [("NVML", "failed: GPU is lost")]
    assert broken.users == 0


def test_unknown_memory_or_peers_hide_nothing_else():
    _, (_, first), (_, second) = machine.ask_nvml(Broken("nvmlDeviceGetMemoryInfo"), None)
    assert first == "A, memory not shown: NVML says GPU is lost, peers 1"
    assert second == "B, memory not shown: NVML says GPU is lost, peers 0"
    _, (_, first), _ = machine.ask_nvml(Broken("nvmlDeviceGetP2PStatus"), None)
    assert first == "A, memory 80.0 GiB, 79.0 GiB free, peers not shown: NVML says GPU is lost"


def test_binding_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert machine.about_gpus() == [("NVML", "not asked: nvidia-ml-py is not installed")]
