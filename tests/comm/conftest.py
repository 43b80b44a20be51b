"""Fixtures of the tests of transports. Without a GPU the cupy transport's kernels are compiled for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from kernel_launches import Launches
from kernel_runner import Kernels

from dataparallel.comm import kernels as launching
from dataparallel.comm import transport_choice
from dataparallel.comm.kernels import Kernel, pack


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Other tests know nothing of what this test has made transports available for."""
    transport_choice.forget()
    yield
    transport_choice.forget()


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


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest) -> Callable:
    """Launches a kernel: on the GPU if there is one, else on the CPU."""
    if request.config.getoption("--devices") == "cuda":
        if (why_not := launching.why_not()) is not None:
            pytest.skip(why_not)
        return launching.launch
    kernels = request.getfixturevalue("kernels")

    def run(kernel: Kernel, pointers: Sequence, counts: Sequence[int], device: object, others: object) -> None:
        kernels.run(pack(kernel, pointers, counts, max_blocks=7), threads=32)

    return run


@pytest.fixture
def launches(launch: Callable, monkeypatch: pytest.MonkeyPatch) -> Launches:
    replaced = Launches(launch)
    monkeypatch.setattr(launching, "launch", replaced.launch)
    return replaced
