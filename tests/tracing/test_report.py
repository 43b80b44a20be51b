"""The report says what the machine has, touches no device, and ends with what to do next."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dataparallel import comm, ownership
from dataparallel.comm import kernels, nccl
from dataparallel.tracing import report
from dataparallel.tracing.report import format_report, look_at_reuse
from reports import make_report
from selection import others_long


def test_no_accelerator():
    text = format_report(make_report())
    assert "accelerator   none\n" in text
    assert "CPU           8 cores, 4 for this process\n" in text
    assert "transport     copy: it works everywhere" in text
    assert "NVML          not asked" in text


def test_other_accelerators_are_counted():
    assert "accelerator   xpu, 1 device\n" in format_report(make_report(["xpu:0"]))
    assert "accelerator   xpu, 2 devices\n" in format_report(make_report(["xpu:0", "xpu:1"]))


def test_a_stand_in_is_named_in_the_line_of_its_devices(monkeypatch):
    text = format_report(make_report(["cuda:0", "cuda:1"], stand_in=True))
    assert (
        "accelerator   cuda, 2 devices of a stand-in: CUDA's and NCCL's functions are answered by it, kernels" in text
    )
    assert "stand-in" not in format_report(make_report(["cuda:0", "cuda:1"]))
    for answer in (False, True):
        with monkeypatch.context() as patch:  # what checks a test afterwards imports the module
            patch.setitem(
                sys.modules, "dataparallel.testing.cuda", SimpleNamespace(is_stand_in=lambda said=answer: said)
            )
            assert report.is_stand_in() is answer


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        ([], 'DataParallel(model, device_ids=["cpu", "cpu"])'),
        (["cuda:0"], "DataParallel(model, device_ids=[0, 0])"),
        (["xpu:0", "xpu:1"], 'DataParallel(model.to("xpu"))'),
    ],
)
def test_it_ends_with_what_to_do_next(devices, line):
    _, what_next = format_report(make_report(devices)).split("\nwhat to do next\n")
    assert line in what_next
    for words in ("dataparallel.trace()", "simulate(4)", "pytest bench", "README.rst"):
        assert words in what_next


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
    """The report's lines from "transport" to the one before "reuse"."""
    lines = format_report(make_report(transports=report.look_at_transports(GPUS))).split("\n")
    first, end = (next(i for i, line in enumerate(lines) if line.startswith(word)) for word in ("transport", "reuse"))
    return lines[first:end]


def test_where_nothing_is_asked_for_one_line_says_how_a_bucket_travels(installed):
    (line,) = transport_lines()
    assert line.startswith("transport     copy: plain tensor copies serve every backend")


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
    assert head == "transport     as asked for"
    assert [line.split()[0] for line in lines] == ["scatter", "broadcast", "reduce_add", "gather"]
    assert [line.split()[1] for line in lines] == [f"{way}:" for way in ways]
    assert words in "".join(lines)


def test_where_all_calls_go_one_way_one_line_says_it(installed, monkeypatch):
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "host")
    assert transport_lines() == ["transport     host: it was asked for"]


def test_a_route_that_is_asked_for_is_said_of_each_call(installed):
    with comm.using(route="tree"):
        _, _, broadcast, reduce_add, _ = transport_lines()
    assert "tree: it was asked for" in broadcast
    assert "star: a tree was asked for" in reduce_add


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
from dataparallel.comm import kernels
from dataparallel.tracing.report import collect, format_report

torch.cuda.is_available, torch.version.hip = lambda: True, None
print(format_report(collect()))
places = [torch.device("cpu"), torch.device("cpu", 0)]  # two names, so that a transport is chosen
for said in ({"transport": "copy"}, {"transport": "host"}, {"transport": "nccl"}, *[{}] * (sys.argv[1] == "")):
    with comm.using(**said):
        select.transport_for("gather", places, [torch.ones(3)])
        select.transport_for("reduce_add", places, [torch.ones(3)])
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
    for line in ("dataparallel ", "torch ", "CPU ", "accelerator ", "NVML ", "NCCL ", "CuPy ", "transport ", "reuse "):
        assert f"\n{line}" in "\n" + text


@pytest.mark.parametrize("why_not", [None, "a test says so"])
def test_what_calls_use_again(why_not, monkeypatch):
    monkeypatch.setattr(ownership, "why_not_trusted", lambda: why_not)
    text = format_report(make_report(reuse=look_at_reuse()))
    assert ("used again" in text) == (why_not is None)
    assert ("a test says so" in text) == (why_not is not None)


@pytest.mark.long
@pytest.mark.devices("cpu", "cuda")  # its process sees no simulated device: once is enough
def test_report_initialises_nothing():
    run_python(
        "-c",
        "import sys, torch\n"
        "from dataparallel.tracing.report import collect, format_report\n"
        "format_report(collect())\n"
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
        "from dataparallel.tracing.report import collect\n"
        "seen = {gpu.split(', memory')[0] for gpu in collect().nvml[1:]}\n"
        "names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}\n"
        "assert names <= seen, (seen, names)",
    )
