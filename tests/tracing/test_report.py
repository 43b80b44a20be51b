"""The report says what the machine has, touches no device, and ends with what to do next. NVML answers for GPUs."""

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
from dataparallel.tracing import report
from dataparallel.tracing.report_parts import Facts, Links, Section, as_text
from selection import others_long

pytestmark = pytest.mark.devices("cpu")  # no device takes part


def test_it_has_a_line_for_each_fact_and_ends_with_what_to_do_next(monkeypatch):
    monkeypatch.setattr(report, "all_devices", lambda: [])
    gpus = [report.Gpu(name, "memory not shown", {}) for name in ("an H100", "another")]
    monkeypatch.setattr(report, "look_at_nvml", lambda: ("not asked", gpus))
    text = report.report()
    for line in ("dataparallel ", "torch ", "CPU ", "NVML          not asked", "NCCL ", "CuPy "):
        assert f"\n{line}" in "\n" + text
    assert "accelerator   none\n" in text
    assert "  GPU 0       an H100, memory not shown, peers none\n  GPU 1       another, " in text
    assert "\ntransport     copy: " in text
    _, what_next = text.split("\nwhat to do next\n")
    for words in ("dataparallel.trace()", "simulate(4)", "pytest bench", "docs/coming_from.rst"):
        assert words in what_next


def test_accelerators_are_counted_and_a_stand_in_is_named(monkeypatch):
    one, two = ([torch.device("xpu", index) for index in range(count)] for count in (1, 2))
    monkeypatch.setitem(sys.modules, "nogpu.cuda", SimpleNamespace(is_stand_in=lambda: False))
    assert [report.in_words(devices) for devices in (one, two)] == ["xpu, 1 device", "xpu, 2 devices"]
    with monkeypatch.context() as patch:  # what checks a test afterwards asks the module
        patch.setitem(sys.modules, "nogpu.cuda", SimpleNamespace(is_stand_in=lambda: True))
        assert report.in_words(two).startswith("xpu, 2 devices of a stand-in: CUDA's and NCCL's functions are answered")


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        ([], 'DataParallel(model, device_ids=["cpu", "cpu"])'),
        (["cuda:0"], "DataParallel(model, device_ids=[0, 0])"),
        (["xpu:0", "xpu:1"], 'DataParallel(model.to("xpu"))'),
    ],
)
def test_what_to_do_next_depends_on_the_devices(devices, line):
    assert line in as_text([report.next_steps([*map(torch.device, devices)])])


def test_cpu_memory(tmp_path):
    meminfo = tmp_path / "meminfo"
    assert "memory" not in report.look_at_cpu(meminfo)
    meminfo.write_text("MemTotal:  4194304 kB\nMemFree:   10 kB\nMemAvailable:  3145728 kB\n")
    assert report.look_at_cpu(meminfo).endswith("for this process; memory 4.0 GiB, 1.0 GiB used, 3.0 GiB free")


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
    assert report.look_for_cupy() == "cupy-cuda12x 13.6.0, cupy-cuda13x 14.0.0"


GPUS = [torch.device("cuda", index) for index in range(2)]


@pytest.fixture
def installed(monkeypatch):
    """NCCL and CuPy, which must not be imported for a report."""

    def imported():
        raise AssertionError("CuPy was imported")

    monkeypatch.setattr(nccl, "why_not", lambda: None)
    monkeypatch.setattr(kernels, "why_not", imported)
    monkeypatch.setattr(kernels, "why_not_installed", lambda: None)
    comm.select.forget()
    yield
    comm.select.forget()


def transport_lines():
    return as_text([Section("", [Facts(report.transport_facts(GPUS))])]).splitlines()


def test_where_nothing_is_asked_for_one_line_says_how_a_bucket_travels(installed):
    (line,) = transport_lines()
    assert line.startswith("transport  copy: plain tensor copies serve every backend")


@pytest.mark.parametrize(
    ("name", "ways", "words"),
    [
        ("nccl", ["copy", "nccl", "copy", "copy"], "deterministic=False"),
        ("cupy", ["copy", "cupy", "cupy", "copy"], "has no gather"),
    ],
)
def test_where_a_transport_is_asked_for_each_call_has_its_line(name, ways, words, installed, monkeypatch):
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", name)
    head, *lines = transport_lines()
    assert head.split() == ["transport", "as", "asked", "for"]
    assert [line.split()[0] for line in lines] == ["scatter", "broadcast", "reduce_add", "gather"]
    assert [line.split()[1] for line in lines] == [f"{way}:" for way in ways]
    assert words in "".join(lines)


def test_where_all_calls_go_one_way_one_line_says_it(installed, monkeypatch):
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "host")
    assert transport_lines() == ["transport  host: it was asked for"]


def test_a_route_that_is_asked_for_is_said_of_each_call(installed):
    with comm.using(route="star"):
        _, _, broadcast, reduce_add, _ = transport_lines()
    assert "star: it was asked for" in broadcast
    assert "star: it was asked for" in reduce_add


def test_a_refusal_is_a_line_too(installed, monkeypatch):
    monkeypatch.setattr(kernels, "why_not_installed", lambda: "CuPy is not installed")
    with comm.using(transport="cupy"):
        _, _, broadcast, _, gather = transport_lines()
    assert "refused: transport 'cupy' was asked for" in broadcast
    assert "CuPy is not installed" in broadcast
    assert "copy: 'cupy' was asked for, but this gather falls back to plain copies" in gather


def test_the_report_does_not_ask_cuda_about_peers(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", None)
    with comm.using(transport="cupy"):
        _, _, broadcast, _, gather = transport_lines()
    assert broadcast.endswith("cupy: it was asked for, if all devices have peer access")
    assert "peer access" not in gather


def test_an_unknown_transport_is_a_line_too(monkeypatch):
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "pigeon")
    (line,) = transport_lines()
    assert line.startswith("transport  refused: the environment variable DATAPARALLEL_TRANSPORT")
    assert "pigeon" in line


def test_buckets_have_the_transport_and_the_route_that_a_call_would_take(installed):
    """A small one goes along a star, and each says why; a route that is asked for is that of all."""
    broadcast, sums = report.bucket_tables([torch.device("cuda", index) for index in range(8)])
    assert [row[:3] for row in broadcast.rows[::4]] == [("64 KiB", "copy", "star"), ("100 MiB", "copy", "chain")]
    assert broadcast.rows[0][3] == "less than 1 MiB"
    with comm.using(route="star"):
        assert {row[2] for table in report.bucket_tables(GPUS) for row in table.rows} == {"star"}
    assert sums.title.startswith("Gradients")


def test_a_bucket_that_is_refused_has_a_row_too(installed, monkeypatch):
    monkeypatch.setattr(kernels, "why_not_installed", lambda: "CuPy is not installed")
    with comm.using(transport="cupy"):
        broadcast, _ = report.bucket_tables(GPUS)
    assert broadcast.rows[0][1] == "refused"
    assert "CuPy is not installed" in broadcast.rows[0][3]


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
from dataparallel.tracing.report import report

torch.cuda.is_available, torch.version.hip = lambda: True, None
print(report())
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
    assert text.startswith("dataparallel  ")
    assert "\nwhat to do next\n" in text


@pytest.mark.long
@pytest.mark.devices("cpu", "cuda")  # its process sees no simulated device: once is enough
def test_report_initialises_nothing():
    run_python(
        "-c",
        "import sys, torch\n"
        "from dataparallel.tracing.report import report\n"
        "report()\n"
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
        "from dataparallel.tracing.report import look_at_nvml\n"
        "seen = {gpu.name for gpu in look_at_nvml()[1]}\n"
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
    head, gpus = report.ask_nvml(fake, visible)
    assert fake.users == 0
    assert head.endswith(f"CUDA_VISIBLE_DEVICES is {shown}")
    assert [*map(str, gpus)] == [
        "H, memory 80.0 GiB, 1.0 GiB used, 79.0 GiB free, peers 1",
        "L, memory 80.0 GiB, 2.0 GiB used, 78.0 GiB free, peers 0",
    ]


@pytest.mark.parametrize(
    ("p2p", "peers"),
    [(0, "1 2"), (1, "none"), ((0, 4), "none"), ((4, 0), "none"), (99, "none")],
)
def test_peers_can_read_and_write(p2p, peers):
    _, (first, *_) = report.ask_nvml(FakeNvml(["H", "H", "H"], p2p), None)
    assert str(first).endswith(f", peers {peers}")


def test_links_are_drawn_as_nvml_knows_them():
    """NVLink, peer access by another way, through the host, and what is not known."""

    def drawn(nvml):
        (links,) = report.links_of([], report.ask_nvml(nvml, None)[1])
        return links

    assert drawn(FakeNvml(["H", "L"], nvlink=0)) == Links(
        [("GPU 0", ["H", "79.0 GiB of 80.0 GiB free"]), ("GPU 1", ["L", "78.0 GiB of 80.0 GiB free"])],
        {(0, 1): "NVLink"},
    )
    assert str(report.ask_nvml(FakeNvml(["H", "L"], nvlink=0), None)[1][0]).endswith("peers 1, NVLink to 1")
    assert drawn(FakeNvml(["H", "L"])).ways == {(0, 1): "peer access"}
    assert drawn(FakeNvml(["H", "L"], p2p=1)).ways == {}
    assert drawn(Broken("nvmlDeviceGetP2PStatus")).ways is None
    assert report.links_of([torch.device("xpu", 0)], []) == [Links([("xpu:0", ())], None)]
    assert report.links_of([], []) == []


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_broken_nvml_is_a_line_of_the_report(function):
    broken = Broken(function)
    assert report.ask_nvml(broken, None) == ("failed: GPU is lost", [])
    assert broken.users == 0


def test_unknown_memory_or_peer_hides_nothing_else():
    first, second = map(str, report.ask_nvml(Broken("nvmlDeviceGetMemoryInfo"), None)[1])
    assert first == "A, memory not shown: NVML says GPU is lost, peers 1"
    assert second == "B, memory not shown: NVML says GPU is lost, peers 0"
    first, _ = map(str, report.ask_nvml(Broken("nvmlDeviceGetP2PStatus"), None)[1])
    assert first == "A, memory 80.0 GiB, 1.0 GiB used, 79.0 GiB free, peers not shown: NVML says GPU is lost"


def test_binding_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.look_at_nvml() == ("not asked: nvidia-ml-py is not installed", [])
