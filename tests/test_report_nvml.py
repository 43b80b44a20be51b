"""NVML's part of the report: the GPUs that CUDA shows, their memory and peer access, and errors of NVML as text."""

import importlib.util
from types import SimpleNamespace

import pytest

from dataparallel import report
from dataparallel.report import Nvml, ask_nvml, format_report
from reports import make_report

GIB = 2**30


class FakeNvml:
    """pynvml with invented GPUs; handles are UUIDs."""

    class NVMLError(Exception):
        pass

    # As nvidia-ml-py has it: a stray comma makes a tuple, which NVML's functions refuse.
    NVML_P2P_CAPS_INDEX_READ = (0,)

    def __init__(self, names, p2p=0):
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

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetName(self, handle):
        return self.gpus[handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        index = list(self.gpus).index(handle)
        return SimpleNamespace(total=80 * GIB, used=(index + 1) * GIB, free=(79 - index) * GIB)

    def nvmlDeviceGetP2PStatus(self, one, other, capability):
        assert capability in (0, 1)
        assert one != other
        return self.p2p[capability] if isinstance(self.p2p, tuple) else self.p2p


class Broken(FakeNvml):
    """Raises NVML's error from one function."""

    def __init__(self, function):
        super().__init__(["A", "B"])

        def fail(*args):
            raise self.NVMLError("GPU is lost")

        setattr(self, function, fail)


def names_under(visible):
    fake = FakeNvml(["A", "B", "C"])
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    seen = ask_nvml(fake, environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert fake.users == 0
    assert seen.note == ""
    return "".join(gpu.split(",")[0] for gpu in seen.gpus)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "ABC"),
        ("", ""),
        ("1", "B"),
        ("2,0", "CA"),
        (" 2 , 0 ", "CA"),
        ("0,-1,1", "A"),
        ("0,3,1", "A"),
        ("0,x,1", "A"),
        ("0,0", ""),
        ("GPU-11", "B"),
        ("GPU-22-C,GPU-00-A", "CA"),
        ("GPU-", ""),
        ("GPU-11,GPU-77,GPU-00", "B"),
        ("GPU-11,GPU-11-B", ""),
        ("MIG-11", ""),
    ],
)
def test_cuda_visible_devices_selects_and_orders(visible, expected):
    assert names_under(visible) == expected


def test_two_gpus():
    nvml = ask_nvml(FakeNvml(["H", "H"]), {})
    text = format_report(make_report(["cuda:0", "cuda:1"], nvml))
    assert "cuda, 2 devices" in text
    assert "cuda:0      H, memory 80.0 GiB, 1.0 GiB used, 79.0 GiB free" in text
    assert "cuda:1      H, memory 80.0 GiB, 2.0 GiB used, 78.0 GiB free" in text
    assert "the first call checks the data" in text
    assert "          cuda:0  cuda:1\n  cuda:0  -       yes\n  cuda:1  yes     -\n" in text


def test_second_gpu_alone_is_torchs_first():
    nvml = ask_nvml(FakeNvml(["H", "H"]), {"CUDA_VISIBLE_DEVICES": "1"})
    text = format_report(make_report(["cuda:0"], nvml))
    assert "cuda, 1 device\n" in text
    assert "cuda:0      H, memory 80.0 GiB, 2.0 GiB used, 78.0 GiB free" in text
    assert "cuda:1" not in text
    assert "peer access" not in text


@pytest.mark.parametrize(
    ("p2p", "cell"),
    [(0, "yes"), (1, "no"), ((0, 4), "no"), ((4, 0), "no"), (99, "no")],
)
def test_peers_can_read_and_write(p2p, cell):
    assert ask_nvml(FakeNvml(["H", "H"], p2p), {}).peers == (("-", cell), (cell, "-"))


def test_order_of_different_gpus_is_not_certain():
    fake = FakeNvml(["A", "B"])
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in ask_nvml(fake, {}).note
    assert ask_nvml(fake, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).note == ""
    assert ask_nvml(FakeNvml(["A", "A"]), {}).note == ""


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_broken_nvml_is_a_line_of_the_report(function):
    broken = Broken(function)
    nvml = ask_nvml(broken, {})
    assert nvml == Nvml(note="failed: GPU is lost")
    assert broken.users == 0
    text = format_report(make_report(["cuda:0", "cuda:1"], nvml))
    assert "NVML          failed: GPU is lost" in text
    assert "names and memory not shown" in text


def test_unknown_memory_or_peer_hides_nothing_else():
    memory = ask_nvml(Broken("nvmlDeviceGetMemoryInfo"), {})
    assert memory.gpus[1] == "B, memory not shown: NVML says GPU is lost"
    assert "A, memory not shown: NVML says" in format_report(make_report(["cuda:0", "cuda:1"], memory))
    peers = ask_nvml(Broken("nvmlDeviceGetP2PStatus"), {})
    assert peers.peers[0] == ("-", "error: GPU is lost")
    assert peers.gpus[0] == "A, memory 80.0 GiB, 1.0 GiB used, 79.0 GiB free"


def test_binding_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.look_at_nvml({}).note == "not asked: nvidia-ml-py is not installed"
