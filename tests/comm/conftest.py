"""Fixtures that several files of this folder use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from kernel_launches import Launches
from kernel_runner import Kernels

from dataparallel.comm import select
from dataparallel.comm.cupy import launch as cupy_kernels
from dataparallel.comm.cupy import transport
from dataparallel.comm.cupy.tables import Kernel, pack


@pytest.fixture
def forgetful() -> Iterator[None]:
    """What a test finds out about transports is not known to other tests."""
    select._forget()
    yield
    select._forget()


@pytest.fixture
def pair(slots: list) -> tuple[torch.device, torch.device]:
    """Two devices."""
    if slots[0] == slots[1]:
        pytest.skip("this needs two devices")
    return slots[0], slots[1]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The CUDA kernels, compiled by a C++ compiler."""
    return Kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest) -> Callable:
    """What launches a kernel: on the GPU where there is one, on the CPU elsewhere."""
    if request.config.getoption("--devices") == "cuda":
        if (why_not := cupy_kernels.why_not()) is not None:
            pytest.skip(why_not)
        return cupy_kernels.launch
    kernels = request.getfixturevalue("kernels")

    def run(kernel: Kernel, pointers: Sequence, counts: Sequence[int], device: object, others: object) -> None:
        kernels.run(pack(kernel, pointers, counts, max_blocks=7), threads=32)

    return run


@pytest.fixture
def launches(launch: Callable, monkeypatch: pytest.MonkeyPatch) -> Launches:
    replaced = Launches(launch)
    monkeypatch.setattr(transport, "launch", replaced)
    return replaced
