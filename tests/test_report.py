import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dataparallel import comm, ownership, report
from dataparallel.comm import nccl
from dataparallel.comm.cupy import launch
from dataparallel.comm.topology import Link, Topology
from dataparallel.report import Cpu, Gpu, Memory, Nvml, Report, Transport, ask_nvml, format_report, look_at_reuse

GIB = 2**30


class FakeNvml:
    """pynvml with GPUs of our own making; handles are UUIDs."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    # As nvidia-ml-py has it: a stray comma makes a tuple, which NVML's functions refuse.
    NVML_P2P_CAPS_INDEX_READ = (0,)

    def __init__(self, names, p2p=0, divided=()):
        self.gpus = {f"GPU-{i}{i}-{name}": name for i, name in enumerate(names)}
        self.gpus |= {f"MIG-{name}": f"{name} MIG" for name in divided}
        self.whole = [uuid for uuid in self.gpus if uuid.startswith("GPU-")]
        self.p2p = p2p
        self.divided = divided
        self.users = 0

    def nvmlInit(self):
        self.users += 1

    def nvmlShutdown(self):
        self.users -= 1

    def nvmlDeviceGetCount(self):
        return len(self.whole)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.whole[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.gpus:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetName(self, handle):
        return self.gpus[handle]

    def nvmlDeviceGetMigMode(self, handle):
        assert handle in self.whole
        if not self.divided:
            raise self.NVMLError_NotSupported("Not Supported")
        return [int(self.gpus[handle] in self.divided)] * 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        assert index == 0
        return f"MIG-{self.gpus[handle]}"

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


def make_report(devices=(), nvml=None, **changes):
    made = Report(
        version="0.1.0",
        torch_version="2.13.0",
        torch_build="CUDA 13.0",
        python="3.11.7",
        cpu=Cpu(8, 4, Memory(64 * GIB, 4 * GIB, 60 * GIB)),
        devices=tuple(torch.device(device) for device in devices),
        nvml=nvml or Nvml(),
        nccl="2.27.5",
        cupy="not installed",
        transport=Transport("", {"broadcast": "copy: it works everywhere"}),
        reuse="yes",
    )
    return replace(made, **changes)


def names_under(visible, names=("A", "B", "C"), **kwargs):
    fake = FakeNvml(names, **kwargs)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    seen = ask_nvml(fake, environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert fake.users == 0
    assert seen.notes == ()
    return "".join(gpu.name for gpu in seen.gpus)


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
    ],
)
def test_cuda_visible_devices_selects_and_orders(visible, expected):
    assert names_under(visible) == expected


@pytest.mark.parametrize("visible", [None, "0", "GPU-00", "MIG-A"])
def test_a_divided_gpu_is_its_first_instance(visible):
    assert names_under(visible, names=("A",), divided=("A",)) == "A MIG"


def test_two_gpus():
    nvml = ask_nvml(FakeNvml(["H", "H"]), {})
    text = format_report(make_report(["cuda:0", "cuda:1"], nvml))
    assert "cuda, 2 devices" in text
    assert "cuda:0      H, memory 80.0 GiB, 1.0 GiB used, 79.0 GiB free" in text
    assert "cuda:1      H, memory 80.0 GiB, 2.0 GiB used, 78.0 GiB free" in text
    assert "nobody has checked the data" in text
    assert "          cuda:0  cuda:1\n  cuda:0  -       yes\n  cuda:1  yes     -\n" in text


def test_second_gpu_alone_is_torchs_first():
    nvml = ask_nvml(FakeNvml(["H", "H"]), {"CUDA_VISIBLE_DEVICES": "1"})
    text = format_report(make_report(["cuda:0"], nvml))
    assert "cuda, 1 device\n" in text
    assert "cuda:0      H, memory 80.0 GiB, 2.0 GiB used, 78.0 GiB free" in text
    assert "cuda:1" not in text
    assert "one device has no peers" in text


@pytest.mark.parametrize(
    ("p2p", "cell"),
    [
        (0, "yes"),
        (1, "no: chipset"),
        ((0, 4), "read yes, write no: disabled by the driver's settings"),
        (99, "status 99"),
    ],
)
def test_peer_access_in_words(p2p, cell):
    assert ask_nvml(FakeNvml(["H", "H"], p2p), {}).peers == (("-", cell), (cell, "-"))


def test_order_of_different_gpus_is_not_certain():
    fake = FakeNvml(["A", "B"])
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in ask_nvml(fake, {}).notes[0]
    assert ask_nvml(fake, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).notes == ()
    assert ask_nvml(FakeNvml(["A", "A"]), {}).notes == ()


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_broken_nvml_is_a_line_of_the_report(function):
    broken = Broken(function)
    nvml = ask_nvml(broken, {})
    assert nvml == Nvml(notes=("failed: GPU is lost",))
    assert broken.users == 0
    text = format_report(make_report(["cuda:0", "cuda:1"], nvml))
    assert "NVML          failed: GPU is lost" in text
    assert "names and memory not shown: NVML lists 0 GPUs" in text


def test_unknown_peers_are_no_reason_to_refuse(monkeypatch):
    monkeypatch.setattr(launch, "why_not_installed", lambda: None)
    comm.select._forget()
    gpus = [torch.device("cuda", index) for index in range(2)]
    with comm.using(transport="cupy"):
        found = report.look_at_transport(gpus, report._between(gpus, Nvml()), are_peers_known=False)
    comm.select._forget()
    assert found.ways["broadcast"].startswith("cupy: ")
    assert found.ways["broadcast"].endswith("if all are peers, which NVML does not tell")
    assert "NVML" not in found.ways["gather"]


def test_unknown_memory_or_peer_hides_nothing_else():
    memory = ask_nvml(Broken("nvmlDeviceGetMemoryInfo"), {})
    assert memory.gpus[1] == Gpu("B", "not shown: NVML says GPU is lost")
    assert "A, memory not shown: NVML says" in format_report(make_report(["cuda:0", "cuda:1"], memory))
    peers = ask_nvml(Broken("nvmlDeviceGetP2PStatus"), {})
    assert peers.peers[0] == ("-", "error: GPU is lost")
    assert peers.gpus[0].memory == Memory(80 * GIB, 1 * GIB, 79 * GIB)


def test_binding_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.look_at_nvml({}).notes == ("not asked: nvidia-ml-py is not installed",)


def test_no_accelerator():
    text = format_report(make_report())
    assert 'none; device_ids=["cpu", "cpu"] makes CPU slots' in text
    assert "8 cores, 4 for this process; memory 64.0 GiB, 4.0 GiB used, 60.0 GiB free" in text
    assert "transport     copy: it works everywhere" in text
    assert "peer access" not in text


def test_gpus_that_torch_does_not_see():
    text = format_report(make_report(nvml=Nvml(gpus=(Gpu("H", "unknown"),))))
    assert "NVML lists H, but this torch does not see any" in text


@pytest.mark.parametrize(("device", "build"), [("xpu:0", "no CUDA, no HIP"), ("cuda:0", "HIP 7.1")])
def test_other_accelerators_are_counted_but_not_touched(device, build):
    text = format_report(make_report([device], torch_build=build))
    assert f"{torch.device(device).type}, 1 device\n" in text
    assert "memory not shown: asking would make a context" in text


def test_cpu_memory(tmp_path):
    meminfo = tmp_path / "meminfo"
    assert report.look_at_cpu(meminfo).memory == f"not shown: this system has no {meminfo}"
    meminfo.write_text("MemTotal:  100 kB\nMemFree:   10 kB\nMemAvailable:  60 kB\n")
    assert report.look_at_cpu(meminfo).memory == Memory(102400, 40960, 61440)


def test_cupy_by_metadata(monkeypatch):
    installed = {}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert report.look_for_cupy() == "not installed"
    installed["cupy-cuda12x"] = "13.6.0"
    assert report.look_for_cupy() == "cupy-cuda12x 13.6.0"
    installed["cupy-cuda13x"] = "14.0.0"
    assert "cupy-cuda13x 14.0.0 (they overwrite each other: keep one)" in report.look_for_cupy()


def test_cupy_without_metadata(monkeypatch, tmp_path):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    (tmp_path / "cupy.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert report.look_for_cupy().startswith("installed")


GPUS = [torch.device("cuda", index) for index in range(2)]
BY_PCIE = Topology(tuple(GPUS), {(0, 1): Link.PEER, (1, 0): Link.PEER})
OUT_OF_REACH = Topology(tuple(GPUS), {(0, 1): Link.HOST, (1, 0): Link.HOST})


@pytest.fixture
def installed(monkeypatch):
    """NCCL and CuPy, which must not be imported for a report."""

    def imported():
        raise AssertionError("CuPy was imported")

    monkeypatch.setattr(nccl, "why_not", lambda: None)
    monkeypatch.setattr(launch, "why_not", imported)
    monkeypatch.setattr(launch, "why_not_installed", lambda: None)
    comm.select._forget()
    yield
    comm.select._forget()


def transport_lines(known):
    return report._transport_lines(report.look_at_transport(GPUS, known))


def test_where_nothing_is_asked_for_one_line_says_how_a_bucket_travels(installed):
    (line,) = transport_lines(BY_PCIE)
    assert line.startswith("transport     copy: plain tensor copies serve every backend")


@pytest.mark.parametrize(
    ("name", "ways", "words"),
    [
        ("nccl", ["copy", "nccl", "copy", "copy"], "deterministic=False"),
        ("cupy", ["copy", "cupy", "cupy", "copy"], "does no gather"),
    ],
)
def test_where_a_transport_is_asked_for_each_call_has_its_line(name, ways, words, installed, monkeypatch):
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", name)
    head, *lines = transport_lines(BY_PCIE)
    assert head.startswith(f"transport     {name!r} is asked for")
    assert [line.split()[0] for line in lines] == ["scatter", "broadcast", "reduce_add", "gather"]
    assert [line.split()[1] for line in lines] == [f"{way}:" for way in ways]
    assert words in "".join(lines)


def test_where_all_calls_go_one_way_one_line_says_it(installed, monkeypatch):
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "host")
    assert transport_lines(BY_PCIE) == ["transport     host: it was asked for"]


def test_a_route_that_is_asked_for_is_said_of_each_call(installed):
    with comm.using(route="tree"):
        head, _, broadcast, reduce_add, _ = transport_lines(BY_PCIE)
    assert head.startswith("transport     route 'tree' is asked for")
    assert "tree: it was asked for" in broadcast
    assert "star: a tree was asked for" in reduce_add


def test_a_refusal_is_a_line_too(installed):
    with comm.using(transport="cupy"):
        _, _, broadcast, _, gather = transport_lines(OUT_OF_REACH)
    assert "refused: transport 'cupy' was asked for" in broadcast
    assert "cuda:0 and cuda:1 have none" in broadcast
    assert "copy: 'cupy' was asked for and leaves this gather to plain copies" in gather


def test_an_unknown_transport_is_a_line_too(monkeypatch):
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "pigeon")
    (line,) = transport_lines(BY_PCIE)
    assert line.startswith("transport     refused: the environment variable DATAPARALLEL_TRANSPORT")
    assert "pigeon" in line


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
from dataparallel.comm import select
from dataparallel.comm.cupy import launch
from dataparallel.report import collect, format_report

torch.cuda.is_available, torch.version.hip = lambda: True, None
print(format_report(collect()))
places = [torch.device("cpu"), torch.device("cpu", 0)]  # two names, so that a transport is chosen
for said in ({"transport": "copy"}, {"transport": "host"}, {"transport": "nccl"}, *[{}] * (sys.argv[1] == "")):
    with comm.using(**said):
        select.transport_for("gather", places, [torch.ones(3)])
        select.transport_for("reduce_add", places, [torch.ones(3)])
assert "cupy" not in sys.modules
print("now")
print(launch.why_not())
"""


@pytest.mark.devices("cpu", "cuda")  # its process sees no simulated device: once is enough
@pytest.mark.parametrize("asked", ["", "cupy"])
def test_cupy_is_imported_where_it_is_asked_for_and_not_by_a_report(asked, tmp_path):
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
    for line in ("dataparallel ", "torch ", "CPU ", "accelerator ", "NCCL ", "CuPy ", "transport ", "reuse "):
        assert f"\n{line}" in "\n" + text


@pytest.mark.parametrize("why_not", [None, "a test says so"])
def test_what_calls_use_again(why_not, monkeypatch):
    monkeypatch.setattr(ownership, "why_not_trusted", lambda: why_not)
    text = format_report(make_report(reuse=look_at_reuse()))
    assert ("used again" in text) == (why_not is None)
    assert ("a test says so" in text) == (why_not is not None)


@pytest.mark.devices("cpu", "cuda")  # its process sees no simulated device: once is enough
def test_report_initialises_nothing():
    run_python(
        "-c",
        "import sys, torch\n"
        "from dataparallel.report import collect, format_report\n"
        "format_report(collect())\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'cupy' not in sys.modules",
    )


@pytest.mark.skipif(
    torch.version.cuda is None or not torch.cuda.is_available() or importlib.util.find_spec("pynvml") is None,
    reason="needs CUDA devices and nvidia-ml-py",
)
def test_names_are_those_of_torch():
    run_python(
        "-c",
        "import torch\n"
        "from dataparallel.report import collect\n"
        "seen = [gpu.name for gpu in collect().nvml.gpus]\n"
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "assert seen == names, (seen, names)",
    )
