"""The description says what the machine has, touches no device, and ends with what to do next."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest
import torch

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


@pytest.mark.parametrize(
    ("asked", "words"),
    [("", "torch's copies; for fully_shard kernels"), ("host", "'host' was asked for"), ("pigeon", "pigeon")],
)
def test_it_says_what_carries_tensors(asked, words, monkeypatch):
    """Also if the environment asks for what does not exist."""
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", asked)
    assert "\ntransport " in machine.description()
    assert words in machine.about_transport()


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
