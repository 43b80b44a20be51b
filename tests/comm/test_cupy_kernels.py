"""Launching the kernels: what is said where it cannot be done, and what they do where there is a GPU."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dataparallel.comm import cupy_kernels
from dataparallel.comm.cupy_kernels import launch, why_not
from dataparallel.comm.kernel_tables import COPY_KERNEL, SUM_KERNELS, THREADS, pack

needs_cuda = pytest.mark.skipif(why_not() is not None, reason=f"needs CUDA and CuPy: {why_not()}")


def test_without_a_cuda_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not() == "torch sees no CUDA device"


def test_without_cupy_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert why_not().startswith("cupy cannot be imported")


@pytest.mark.parametrize("places", [("cpu", "cuda:0"), ("cuda:0", "cuda:1", "cpu")])
def test_memory_off_cuda_is_refused(places: tuple[str, ...]) -> None:
    device, *others = map(torch.device, places)
    with pytest.raises(ValueError, match="memory of CUDA devices; got cpu"):
        launch(COPY_KERNEL, [[0], [0]], [4], device, others)


@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_where_nothing_has_an_element_nothing_is_launched(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_kernels, "_max_blocks", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    launch(COPY_KERNEL, [counts, counts], counts, torch.device("cuda", 0), [torch.device("cuda", 1)])


class Event:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_tables_are_held_until_their_event_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_kernels, "_held", [])
    first, second, third = Event(), Event(), Event()
    cupy_kernels._hold_until(first, [])
    cupy_kernels._hold_until(second, [])
    second.passed = True
    cupy_kernels._hold_until(third, [])
    assert [event for event, _ in cupy_kernels._held] == [first, third]


class Stream:
    """A stream that writes down what is asked of it."""

    def __init__(self, index: int, log: list[tuple]) -> None:
        self.index, self.log, self.cuda_stream = index, log, 1000 + index

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(("stream", self.index, "waits for stream", other.index))

    def record_event(self) -> Event:
        self.log.append(("stream", self.index, "records"))
        return Event()

    def wait_event(self, event: Event) -> None:
        self.log.append(("stream", self.index, "waits for the event"))


class FakeModule:
    def __init__(self, log: list[tuple]) -> None:
        self.log = log

    def get_function(self, name: str) -> Callable[..., None]:
        def function(grid: tuple, block: tuple, args: tuple, stream: object) -> None:
            self.log.append(("launch", name, grid, block, args[1:], stream.ptr))

        return function


def test_a_launch_comes_between_what_the_other_devices_did_and_do_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices and streams are made up: it is the order that counts, and what a kernel is called with."""
    log: list[tuple] = []
    streams = {index: Stream(index, log) for index in range(3)}
    devices = [torch.device("cpu", index) for index in range(3)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.index])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda index: nullcontext())))
    monkeypatch.setattr(cupy_kernels, "_module", lambda index: FakeModule(log))
    monkeypatch.setattr(cupy_kernels, "_held", [])
    cupy_kernels._function.cache_clear()
    packed = pack(SUM_KERNELS[torch.float32], [[0], [16], [32]], [5], max_blocks=4)
    cupy_kernels._launch(packed, devices[0], [devices[0], devices[2], devices[2]])
    cupy_kernels._function.cache_clear()
    assert log == [
        ("stream", 0, "waits for stream", 2),
        ("launch", "sum_float32", (1,), (THREADS,), (1, 3, 1024), 1000),
        ("stream", 0, "records"),
        ("stream", 2, "waits for the event"),
    ]
    ((_, (pinned, table)),) = cupy_kernels._held
    assert torch.equal(pinned, packed.table)
    assert torch.equal(table, pinned)


@needs_cuda
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
