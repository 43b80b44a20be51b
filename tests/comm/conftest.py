"""Fixtures of the tests of transports. Without a GPU the kernels are compiled for the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_runner import Kernels

from dataparallel.comm import transport_choice
from dataparallel.comm.kernels import DeviceTable
from dataparallel.comm.settings import TRANSPORT_VARIABLE

ROUTES = {"star": 2**62, "chain": 0}
"""Ways of plain copies between three devices or more: below how many bytes they take a star."""


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Other tests know nothing of what this test has made transports available for."""
    choose_again()
    yield
    choose_again()


def choose_again() -> None:
    """Forgets all transports."""
    transport_choice._transport.cache_clear()
    transport_choice._why_no_tables.cache_clear()


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How all tensors travel, in every thread: one of `ROUTES`, or a transport. Tests give it by ``indirect``."""
    name: str = request.param
    monkeypatch.setenv(TRANSPORT_VARIABLE, "copy" if name in ROUTES else name)
    if name in ROUTES:
        monkeypatch.setattr(transport_choice, "STAR_BELOW_BYTES", ROUTES[name])
    return name


@pytest.fixture
def pair(slots: list) -> tuple[torch.device, torch.device]:
    """Two devices."""
    if slots[0] == slots[1]:
        pytest.skip("this needs two devices")
    return slots[0], slots[1]


@pytest.fixture
def peer_devices(slots: list) -> list[torch.device]:
    """Devices whose kernels read peers."""
    found = [*map(torch.device, slots)]
    if (reason := transport_choice.why_no_tables(found)) is not None:
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The CUDA kernels, compiled by a C++ compiler."""
    return Kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts the launches of kernels: copies and sums."""
    counted: Counter = Counter()
    launch = DeviceTable.launch

    def noted(table: DeviceTable, *args: Any) -> None:
        name = table._packed.kernel
        counted["sum" if name.startswith("sum") else name] += 1
        launch(table, *args)

    monkeypatch.setattr(DeviceTable, "launch", noted)
    return counted
