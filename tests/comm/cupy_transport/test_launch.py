"""Launching the kernels: the reasons why it is impossible here, and what comes before a first launch.

The order of the streams is in ``nogpu/cuda/test_cupy.py``, where a launch really runs.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dataparallel.comm import kernels as launching
from dataparallel.comm.kernels import COPY_KERNEL, launch, why_not

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)


def test_without_cupy_it_says_so(on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert why_not() == "CuPy is not installed"


def test_devices_without_peer_access_in_both_directions_are_a_reason(
    on_cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cupy.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "cupy", None)  # so that what is there is put back, also where nothing is
    del sys.modules["cupy"]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one.index, other.index) != (2, 1))
    devices = [torch.device("cuda", index) for index in (0, 1, 2, 1)]
    assert why_not(devices) == "it needs peer access between all devices, and cuda:2 and cuda:1 have none"
    assert why_not([torch.device("cpu"), *devices[:2]]) is None


def test_memory_off_cuda_is_refused() -> None:
    for device, other in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
        with pytest.raises(ValueError, match="memory of CUDA devices; got cpu"):
            launch(COPY_KERNEL, [[0], [0]], [4], torch.device(device), [torch.device(other)])


def test_where_nothing_has_an_element_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    for counts in ([], [0, 0]):
        launch(COPY_KERNEL, [counts, counts], counts, torch.device("cuda", 0), [torch.device("cuda", 1)])


class TestPeerAccess:
    """torch enables it in a copy, and for one direction. The check of peers copies too, but may be turned off."""

    @pytest.fixture
    def copied(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
        found: list[tuple] = []
        launching.forget()
        monkeypatch.setattr(launching, "_copy", lambda *pair: found.append(tuple(device.index for device in pair)))
        yield found
        launching.forget()

    def test_each_pair_is_copied_between_once_in_both_directions(self, copied: list[tuple]) -> None:
        zero, one, two = (torch.device("cuda", index) for index in range(3))
        launching.make_reachable(zero, [one, two, one])
        assert copied == [(0, 1), (1, 0), (0, 2), (2, 0)]
        launching.make_reachable(two, [zero, one])
        assert copied[4:] == [(2, 1), (1, 2)]

    def test_a_copy_that_fails_is_no_launch_and_is_made_again(
        self, copied: list[tuple], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*pair: torch.device) -> None:
            raise RuntimeError("out of memory")

        zero, one = (torch.device("cuda", index) for index in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(launching, "_copy", fails)
            patch.setattr(torch.cuda, "current_stream", None)  # which a launch asks for
            with pytest.raises(RuntimeError, match="out of memory"):
                launch(COPY_KERNEL, [[0], [0]], [4], zero, [one])
        launching.make_reachable(zero, [one])
        assert copied == [(0, 1), (1, 0)]


def test_a_compiler_that_fails_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's own error is no RuntimeError."""

    def fails(index: int) -> None:
        raise LookupError("nvrtc: error: invalid value for --gpu-architecture")

    launching._function.cache_clear()
    monkeypatch.setattr(launching, "_module", fails)
    with pytest.raises(RuntimeError, match=r"cannot compile the kernels \(LookupError: nvrtc: error"):
        launching._function("copy_many", 0)
