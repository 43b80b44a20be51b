"""Launching the kernels: the reasons why it is impossible here, and the results on a GPU.

Without a GPU the steps of a launch are tested one by one: they are private functions of ``comm.kernels``.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clocked import counted
from dataparallel.comm import kernels as launching
from dataparallel.comm.kernels import COPY_KERNEL, SUM_KERNELS, THREADS, launch, pack, why_not
from processes import run_script

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

needs_cuda = pytest.mark.skipif(why_not() is not None, reason=f"needs CUDA and CuPy: {why_not()}")


def test_without_a_cuda_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not() == "torch sees no CUDA device"


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.fixture
def install_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that puts a CuPy with this text where it is imported from. After the test it was never imported."""

    def install(text: str) -> None:
        (tmp_path / "cupy.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "cupy", None)  # so that what is there now is put back, also where nothing is
        del sys.modules["cupy"]

    return install


def test_without_cupy_it_says_so(on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert why_not() == "CuPy is not installed"


BROKEN = {
    "ImportError": "libnvrtc.so.12: cannot open shared object file",
    "RuntimeError": "CuPy failed to load libnvrtc",
    "AttributeError": "module 'numpy' has no attribute 'bool'",
    "OSError": "libcublas.so.12: undefined symbol",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_cupy_that_cannot_be_imported_is_a_reason(
    name: str, on_cuda: None, install_cupy: Callable[[str], None]
) -> None:
    install_cupy(f"raise {name}({BROKEN[name]!r})")
    assert why_not() == f"cupy cannot be imported ({name}: {BROKEN[name]})"


def test_what_is_said_without_an_import_imports_nothing(on_cuda: None, install_cupy: Callable[[str], None]) -> None:
    install_cupy("raise SystemExit('imported')")
    assert launching.why_not_installed() is None


@pytest.mark.parametrize("one_way", [(1, 2), (2, 1)])
def test_devices_without_peer_access_in_both_directions_are_a_reason(
    one_way: tuple[int, int],
    on_cuda: None,
    install_cupy: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_cupy("")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one.index, other.index) != one_way)
    devices = [torch.device("cuda", index) for index in (0, 1, 2, 1)]
    one, other = (f"cuda:{index}" for index in one_way)
    assert why_not(devices) == f"it needs peer access between all devices, and {one} and {other} have none"
    assert why_not([torch.device("cpu"), *devices[:2]]) is None


@pytest.mark.parametrize("places", [("cpu", "cuda:0"), ("cuda:0", "cuda:1", "cpu")])
def test_memory_off_cuda_is_refused(places: tuple[str, ...]) -> None:
    device, *others = map(torch.device, places)
    with pytest.raises(ValueError, match="memory of CUDA devices; got cpu"):
        launch(COPY_KERNEL, [[0], [0]], [4], device, others)


@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_where_nothing_has_an_element_nothing_is_launched(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    launch(COPY_KERNEL, [counts, counts], counts, torch.device("cuda", 0), [torch.device("cuda", 1)])


class Event:
    """``of``: the index of the stream on which it was recorded."""

    def __init__(self, stream: "Stream") -> None:
        self.of = stream.index
        stream.log.append(("stream", stream.index, "records"))

    def make_wait(self, stream: "Stream") -> None:
        stream.log.append(("stream", stream.index, "waits for", self.of))


class Stream:
    """A stream that writes down what is asked of it."""

    def __init__(self, index: int, log: list[tuple]) -> None:
        self.index, self.log, self.cuda_stream = index, log, 1000 + index


class FakeModule:
    def __init__(self, log: list[tuple]) -> None:
        self.log = log

    def get_function(self, name: str) -> Callable[..., None]:
        def function(grid: tuple, block: tuple, args: tuple, stream: object) -> None:
            self.log.append(("launch", name, grid, block, args[1:4], stream.ptr))

        return function


class Machine:
    """Devices, streams and a CuPy that are made up: it is the order that counts, and what a kernel is called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple] = []
        self.held: list[torch.Tensor] = []
        self.devices = [torch.device("cpu", index) for index in range(4)]
        streams = {device: Stream(device.index, self.log) for device in self.devices}
        cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda index: nullcontext()))
        monkeypatch.setattr(torch.cuda, "current_stream", streams.get)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(launching, "_module", lambda index: FakeModule(self.log))
        monkeypatch.setattr(launching, "current_streams", lambda devices: {each: streams[each] for each in devices})
        monkeypatch.setattr(launching, "Event", Event)
        monkeypatch.setattr(launching, "hold", lambda memory, event: self.held.extend(memory))
        monkeypatch.setattr(launching, "_copy", self.copy)

    def copy(self, source: torch.device, target: torch.device) -> None:
        self.log.append(("copy", source.index, target.index))

    def launch(self, device: int, *others: int) -> list[tuple]:
        """What a launch has done."""
        self.log.clear()
        launching._launch(PACKED, self.devices[device], [self.devices[other] for other in others])
        return [*self.log]


PACKED = pack(SUM_KERNELS[torch.float32], [[0], [16], [32]], [5], max_blocks=4)
LAUNCH = ("launch", "sum_float32", (1,), (THREADS,), (1, 3, 1024))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    launching._function.cache_clear()
    launching.forget()
    yield Machine(monkeypatch)
    launching._function.cache_clear()
    launching.forget()


def test_a_launch_comes_between_what_the_other_devices_did_and_do_next(machine: Machine) -> None:
    machine.launch(0, 2)
    machine.held.clear()
    assert machine.launch(0, 0, 2, 2) == [
        ("stream", 2, "records"),
        ("stream", 0, "waits for", 2),
        (*LAUNCH, 1000),
        ("stream", 0, "records"),
        ("stream", 2, "waits for", 0),
    ]
    assert all(torch.equal(table, PACKED.table) for table in machine.held)
    assert len(machine.held) == 2


def copies(log: list[tuple]) -> list[tuple]:
    return [entry[1:] for entry in log if entry[0] == "copy"]


@pytest.mark.parametrize("check", ["0", "1"])
def test_each_pair_is_copied_between_in_both_directions_before_its_first_launch(
    check: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in a copy torch enables peer access, which the kernel needs; the check of peers may be turned off."""
    monkeypatch.setenv("DATAPARALLEL_PEER_CHECK", check)
    log = machine.launch(0, 1, 2, 1, 0)
    assert copies(log) == [(0, 1), (1, 0), (0, 2), (2, 0)]
    assert log[:4] == [("copy", *pair) for pair in copies(log)], "before anything is launched"
    assert (*LAUNCH, 1000) in log[4:]
    assert copies(machine.launch(0, 2, 1)) == []
    assert copies(machine.launch(2, 0)) == [], "both directions are done"
    assert copies(machine.launch(2, 0, 1)) == [(2, 1), (1, 2)]
    assert copies(machine.launch(3)) == []


def test_a_copy_that_fails_is_no_launch_and_is_made_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: torch.device, target: torch.device) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(launching, "_copy", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            machine.launch(0, 1)
    assert machine.log == []
    assert copies(machine.launch(0, 1)) == [(0, 1), (1, 0)]


@pytest.mark.devices("sim", "stand-in")
def test_what_is_copied_is_one_byte_from_device_to_device(slots: list) -> None:
    with counted() as counts:
        launching._copy(slots[0], slots[1])
    assert counts.copied == {(slots[0].index, slots[1].index): 1}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_copies_again_and_waits_for_nobody() -> None:
    run_script("""
import os, warnings
import torch
from dataparallel.comm import kernels as launching
warnings.simplefilter("ignore")
copied = []
launching._copy = lambda source, target: copied.append((source.index, target.index))
one, other = torch.device("cpu", 0), torch.device("cpu", 1)
launching.make_reachable(one, [other])
assert copied == [(0, 1), (1, 0)]
launching._reaching.acquire()
child = os.fork()
if child == 0:
    launching.make_reachable(one, [other])
    os._exit(0 if len(copied) == 4 else 1)
assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 0
""")


class CompileException(Exception):
    """As CuPy's, which is no RuntimeError."""


def test_a_compiler_that_fails_is_an_error_in_words(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(index: int) -> FakeModule:
        raise CompileException("nvrtc: error: invalid value for --gpu-architecture")

    monkeypatch.setattr(launching, "_module", fails)
    with pytest.raises(RuntimeError, match=r"cannot compile the kernels \(CompileException: nvrtc: error") as caught:
        machine.launch(0, 1)
    assert isinstance(caught.value.__cause__, CompileException)


@needs_cuda
@pytest.mark.devices("cuda")
def test_copies_and_sums_on_a_gpu_are_those_of_torch() -> None:
    device, numels = torch.device("cuda", 0), [1, 100, 12_345, 10**6]
    slots = [[torch.randn(numel, device=device) for numel in numels] for _ in range(3)]
    out, copies = ([torch.empty_like(tensor) for tensor in slots[0]] for _ in range(2))
    rows = [[tensor.data_ptr() for tensor in row] for row in (out, *slots)]
    launch(SUM_KERNELS[torch.float32], rows, numels, device, [])
    rows = [[tensor.data_ptr() for tensor in row] for row in (slots[1], copies)]
    launch(COPY_KERNEL, rows, [4 * numel for numel in numels], device, [])
    for result, copied, first, second, third in zip(out, copies, *slots, strict=True):
        assert torch.equal(result, first + second + third)
        assert torch.equal(copied, second)
