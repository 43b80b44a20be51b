"""NVML's part of the report: all GPUs, their memory and peer access, and errors of NVML as text."""

import importlib.util
from types import SimpleNamespace

import pytest

from dataparallel.tracing import report
from dataparallel.tracing.report import ask_nvml, format_report
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


@pytest.mark.parametrize(("visible", "shown"), [(None, "not set"), ("1,0", "'1,0'"), ("", "''")])
def test_all_gpus_are_listed_whatever_cuda_shows(visible, shown):
    fake = FakeNvml(["H", "L"])
    text = format_report(make_report(["cuda:0"], nvml=ask_nvml(fake, visible)))
    assert fake.users == 0
    assert f"CUDA_VISIBLE_DEVICES is {shown}\n" in text
    assert "GPU 0       H, memory 80.0 GiB, 1.0 GiB used, 79.0 GiB free, peers 1\n" in text
    assert "GPU 1       L, memory 80.0 GiB, 2.0 GiB used, 78.0 GiB free, peers 0\n" in text


@pytest.mark.parametrize(
    ("p2p", "peers"),
    [(0, "1 2"), (1, "none"), ((0, 4), "none"), ((4, 0), "none"), (99, "none")],
)
def test_peers_can_read_and_write(p2p, peers):
    _, first, *_ = ask_nvml(FakeNvml(["H", "H", "H"], p2p), None)
    assert first.endswith(f", peers {peers}")


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_broken_nvml_is_a_line_of_the_report(function):
    broken = Broken(function)
    nvml = ask_nvml(broken, None)
    assert nvml == ["failed: GPU is lost"]
    assert broken.users == 0
    assert "NVML          failed: GPU is lost" in format_report(make_report(["cuda:0", "cuda:1"], nvml=nvml))


def test_unknown_memory_or_peer_hides_nothing_else():
    _, first, second = ask_nvml(Broken("nvmlDeviceGetMemoryInfo"), None)
    assert first == "A, memory not shown: NVML says GPU is lost, peers 1"
    assert second == "B, memory not shown: NVML says GPU is lost, peers 0"
    _, first, _ = ask_nvml(Broken("nvmlDeviceGetP2PStatus"), None)
    assert first == "A, memory 80.0 GiB, 1.0 GiB used, 79.0 GiB free, peers not shown: NVML says GPU is lost"


def test_binding_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.look_at_nvml() == ["not asked: nvidia-ml-py is not installed"]
