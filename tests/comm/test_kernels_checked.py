"""Kernels that read peers serve where NVLink joins all devices and a check has passed; otherwise the log says why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.comm import peers, transport_choice
from dataparallel.comm.kernels import DeviceTable
from dataparallel.comm.peers import kernels_pass_check, why_no_kernels_by_default
from dataparallel.comm.transport_choice import why_no_tables

pytestmark = [pytest.mark.slots(4), pytest.mark.usefixtures("forgetful")]


@pytest.mark.devices("sim", "cuda")
def test_the_check_passes_where_kernels_are_right(peer_devices: list) -> None:
    assert kernels_pass_check(peer_devices)


Launch = Callable[[DeviceTable, Sequence[Tensor], Any], None]


class Faults:
    """Planted faults of a kernel. Each is one of ``DeviceTable.launch``: with a term of each device, then targets."""

    def __init__(self, right: Launch, devices: Sequence[torch.device]) -> None:
        self._right, self._bad, self._count = right, devices[2], len(devices)
        self._first: dict[int, list[Tensor]] = {}

    def reads_stale_values(self, table: DeviceTable, tensors: Sequence[Tensor], shifts: Any = None) -> None:
        """The device reads a peer's memory as it was at first."""
        terms, targets = tensors[: self._count], tensors[self._count :]
        if table.device == self._bad:
            terms = self._first.setdefault(id(table), [term.clone() for term in terms])
            for term in terms:
                torch.accelerator.synchronize(term.device)
        self._right(table, [*terms, *targets], shifts)

    def adds_in_another_order(self, table: DeviceTable, tensors: Sequence[Tensor], shifts: Any = None) -> None:
        terms, targets = tensors[: self._count], tensors[self._count :]
        if len(targets) == 1 and table.device == self._bad:
            terms = terms[::-1]
        self._right(table, [*terms, *targets], shifts)

    def writes_nothing(self, table: DeviceTable, tensors: Sequence[Tensor], shifts: Any = None) -> None:
        if table.device != self._bad:
            self._right(table, tensors, shifts)

    def loses_a_part(self, table: DeviceTable, tensors: Sequence[Tensor], shifts: Any = None) -> None:
        self._right(table, tensors, shifts)
        if table.device == self._bad:
            tensors[-1][-7:].zero_()


@pytest.mark.devices("sim", "cuda")
@pytest.mark.parametrize("fault", ["reads_stale_values", "adds_in_another_order", "writes_nothing", "loses_a_part"])
def test_the_check_finds_a_device_whose_kernels_are_wrong(
    fault: str, peer_devices: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = getattr(Faults(DeviceTable.launch, peer_devices), fault)
    monkeypatch.setattr(DeviceTable, "launch", lambda *arguments: wrong(*arguments))
    assert not kernels_pass_check(peer_devices)


@pytest.mark.devices("stand-in")
def test_after_a_check_that_failed_copies_serve_and_the_log_says_so_once(
    peer_devices: list, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport_choice._why_no_tables.cache_clear()
    monkeypatch.setattr(peers, "kernels_pass_check", lambda devices: False)
    with caplog.at_level(logging.INFO, logger="dataparallel"):
        for _ in range(2):
            assert "have failed their check" in str(why_no_tables(peer_devices))
    assert len(caplog.records) == 1
    with comm.using(transport="cupy"):
        assert why_no_tables(peer_devices) is None


# ---- what is asked first ---------------------------------------------------------------------------------------------


class Nvml:
    """In place of ``pynvml``: which pairs NVLink joins."""

    NVMLError = RuntimeError

    def __init__(self, joined: Callable[[str, str], bool]) -> None:
        self.joined = joined
        self.is_on = False

    def nvmlInit(self) -> None:
        self.is_on = True

    def nvmlShutdown(self) -> None:
        self.is_on = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, way: int) -> int:
        assert self.is_on
        assert way == 2, "by NVLink"
        return 0 if self.joined(one, other) else 3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Nvml | None, str], list[torch.device]]:
    """A function that makes a machine of four GPUs up, with this NVML and allocator."""

    def make(nvml: Nvml | None, allocator: str = "native") -> list[torch.device]:
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of-{device.index}")
        )
        monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if nvml is None else object())
        monkeypatch.setattr(peers.importlib, "import_module", lambda name: nvml)
        monkeypatch.setattr(peers, "kernels_pass_check", lambda devices: True)
        return [torch.device("cuda", index) for index in range(4)]

    return make


def no_answer(one: str, other: str) -> bool:
    raise RuntimeError("not supported")


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(
    ("nvml", "allocator", "reason"),
    [
        (Nvml(lambda one, other: True), "native", None),
        (Nvml(lambda *pair: pair != ("GPU-of-1", "GPU-of-3")), "native", "no NVLink joins cuda:1 and cuda:3"),
        (Nvml(no_answer), "native", "NVML does not say whether NVLink joins the devices: not supported"),
        (None, "native", "nvidia-ml-py is not installed"),
        (Nvml(lambda one, other: True), "cudaMallocAsync", "cudaMallocAsync"),
    ],
    ids=["NVLink", "one pair without", "an error of NVML", "no NVML", "the asynchronous allocator"],
)
def test_by_default_they_serve_where_nvlink_joins_all_pairs(
    nvml: Nvml | None, allocator: str, reason: str | None, cuda: Any
) -> None:
    found = why_no_kernels_by_default(cuda(nvml, allocator))
    assert found is None if reason is None else reason in found
    assert nvml is None or not nvml.is_on
