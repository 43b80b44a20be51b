"""Launching the kernels: the reasons why it is impossible here, and what comes before it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clocked import counted
from dataparallel.comm import kernels as launching
from dataparallel.comm.kernels import make_reachable, why_not

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough


CUDA = [torch.device("cuda", index) for index in range(3)]


def test_on_other_devices_it_says_so() -> None:
    assert why_not([torch.device("mps", 0)]) == "the kernels are for CUDA devices, and mps:0 is none"


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were CUDA devices, all of them peers."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
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


def test_a_cupy_that_cannot_be_imported_is_a_reason(on_cuda: None, install_cupy: Callable[[str], None]) -> None:
    install_cupy("raise OSError('libcublas.so.12: undefined symbol')")
    assert why_not(CUDA) == "CuPy cannot be imported (OSError: libcublas.so.12: undefined symbol)"


@pytest.mark.parametrize("one_way", [(1, 2), (2, 1)])
def test_devices_without_peer_access_in_both_directions_are_a_reason(
    one_way: tuple[int, int],
    on_cuda: None,
    install_cupy: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_cupy("")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one.index, other.index) != one_way)
    one, other = (f"cuda:{index}" for index in one_way)
    assert why_not(CUDA) == f"it needs peer access between all devices, and {one} and {other} have none"
    assert why_not(CUDA[:2]) is None


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The copies between pairs of devices, which are not made."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(launching, "_copy", lambda source, target: found.append((source.index, target.index)))
    monkeypatch.setattr(launching, "_reachable", set())
    return found


def test_each_pair_is_copied_between_once_in_both_directions(copied: list[tuple[int, int]]) -> None:
    """Only in a copy torch enables peer access, which kernels need."""
    devices = [torch.device("cpu", index) for index in range(4)]
    make_reachable(devices[:3])
    assert copied == [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
    make_reachable(devices[:0:-1])
    assert copied[6:] == [(3, 2), (2, 3), (3, 1), (1, 3)]
    make_reachable(devices[:1])
    assert len(copied) == 10


def test_a_copy_that_fails_is_made_again(copied: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: torch.device, target: torch.device) -> None:
        raise RuntimeError("out of memory")

    one, other = torch.device("cpu", 0), torch.device("cpu", 1)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "_copy", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            make_reachable([one, other])
    make_reachable([one, other])
    assert copied == [(0, 1), (1, 0)]


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.apart(2)
def test_what_is_copied_is_one_byte_from_device_to_device(slots: list) -> None:
    with counted() as counts:
        launching._copy(slots[0], slots[1])
    assert counts.copied == {(slots[0].index, slots[1].index): 1}
