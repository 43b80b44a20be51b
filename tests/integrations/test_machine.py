"""The description says what the machine has, touches no device, and ends with what to do next."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dataparallel import comm
from dataparallel.comm import kernels, nccl
from dataparallel.integrations import machine
from selection import others_long

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


def test_accelerators_are_counted_and_a_stand_in_is_named(monkeypatch):
    one, two = ([torch.device("xpu", index) for index in range(count)] for count in (1, 2))
    monkeypatch.setitem(sys.modules, "nogpu.cuda", SimpleNamespace(is_stand_in=lambda: False))
    assert [machine.about(devices) for devices in (one, two)] == ["xpu, 1 device", "xpu, 2 devices"]
    with monkeypatch.context() as patch:  # what checks a test afterwards asks the module
        patch.setitem(sys.modules, "nogpu.cuda", SimpleNamespace(is_stand_in=lambda: True))
        assert machine.about(two).startswith("xpu, 2 devices of a stand-in for CUDA, ")


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


def test_cupy_by_metadata(monkeypatch):
    installed = {}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert machine.about_cupy() == "not installed"
    installed["cupy-cuda12x"] = "13.6.0"
    assert machine.about_cupy() == "cupy-cuda12x 13.6.0"
    installed["cupy-cuda13x"] = "14.0.0"
    assert machine.about_cupy() == "cupy-cuda12x 13.6.0, cupy-cuda13x 14.0.0"


GPUS = [torch.device("cuda", index) for index in range(2)]


@pytest.fixture
def installed(monkeypatch):
    """NCCL and CuPy, which must not be imported for a description."""

    def imported():
        raise AssertionError("CuPy was imported")

    monkeypatch.setattr(nccl, "why_not", lambda: None)
    monkeypatch.setattr(kernels, "why_not", imported)
    monkeypatch.setattr(kernels, "why_not_installed", lambda: None)
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


def test_so_is_a_route(installed):
    with comm.using(route="star"):
        assert {route for name, (_, route, _) in carried().items()} == {"star"}


def test_a_refusal_is_a_row_too(installed, monkeypatch):
    monkeypatch.setattr(kernels, "why_not_installed", lambda: "CuPy is not installed")
    with comm.using(transport="cupy"):
        found = carried()
    assert found["weights 25 MiB"][0] == "refused"
    assert "CuPy is not installed" in found["weights 25 MiB"][2]
    assert "falls back to plain copies" in found["outputs"][2]


def test_cuda_is_not_asked_about_peers(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", None)
    with comm.using(transport="cupy"):
        found = carried()
    assert found["weights 25 MiB"][2].endswith("it was asked for, if all devices have peer access")
    assert "peer access" not in found["outputs"][2]


def test_an_unknown_transport_is_said_too(monkeypatch):
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "pigeon")
    assert {way for way, *_ in carried().values()} == {"refused"}
    assert "pigeon" in carried()["batch"][2]


def run_python(*arguments, **changes):
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


UNASKED = """
import sys
import torch
from dataparallel import comm
from dataparallel.comm import transport_choice
from dataparallel.comm import kernels
from dataparallel.integrations.machine import description

torch.cuda.is_available, torch.version.hip = lambda: True, None
print(description())
places = [torch.device("cpu"), torch.device("cpu", 0)]  # two names, so that a transport is chosen
for said in ({"transport": "copy"}, {"transport": "host"}, {"transport": "nccl"}, *[{}] * (sys.argv[1] == "")):
    with comm.using(**said):
        transport_choice.transport_for("gather", places, [torch.ones(3)])
        transport_choice.transport_for("reduce_add", places, [torch.ones(3)])
assert "cupy" not in sys.modules
print("now")
print(kernels.why_not())
"""


@pytest.mark.long
@pytest.mark.devices("cpu", "cuda")  # its process sees no simulated device: once is enough
@pytest.mark.parametrize("asked", others_long(["", "cupy"], [""]))
def test_cupy_is_imported_where_it_is_asked_for_and_not_by_a_description(asked, tmp_path):
    """Here torch says that there is CUDA, and CuPy says that it is imported, and then that it cannot be."""
    (tmp_path / "cupy.py").write_text("print('imported')\nraise RuntimeError('numpy is too new')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    printed = run_python("-c", UNASKED, asked, PYTHONPATH=paths, DATAPARALLEL_TRANSPORT=asked)
    before, after = printed.split("now\n")
    assert "imported" not in before
    assert after == "imported\ncupy cannot be imported (RuntimeError: numpy is too new)\n"


@pytest.mark.devices("cpu", "cuda")  # its process sees no simulated device: once is enough
def test_python_dash_m():
    text = run_python("-m", "dataparallel")
    assert text.startswith("dataparallel  ")
    assert "\nwhat to do next\n" in text


@pytest.mark.long
@pytest.mark.devices("cpu", "cuda")  # its process sees no simulated device: once is enough
def test_it_initialises_nothing():
    run_python(
        "-c",
        "import sys, torch\n"
        "from dataparallel.integrations.machine import description\n"
        "description()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'cupy' not in sys.modules",
    )


@pytest.mark.long
@pytest.mark.skipif(
    torch.version.cuda is None or not torch.cuda.is_available() or importlib.util.find_spec("pynvml") is None,
    reason="needs CUDA devices and nvidia-ml-py",
)
def test_names_are_those_of_torch():
    run_python(
        "-c",
        "import torch\n"
        "from dataparallel.integrations.machine import about_gpus\n"
        "seen = {text.split(',')[0] for _, text in about_gpus()[1:]}\n"
        "names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}\n"
        "assert names <= seen, (seen, names)",
    )


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
    ("p2p", "peers"),
    [(0, "1 2"), (1, "none"), ((0, 4), "none"), ((4, 0), "none"), (99, "none")],
)
def test_peers_can_read_and_write(p2p, peers):
    _, (_, first), *_ = machine.ask_nvml(FakeNvml(["H", "H", "H"], p2p), None)
    assert first.endswith(f", peers {peers}")


def test_links_are_those_of_nvml():
    assert machine.ask_nvml(FakeNvml(["H", "L"], nvlink=0), None)[1][1].endswith("peers 1, NVLink to 1")


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
