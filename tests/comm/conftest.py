"""Fixtures of the tests of the cupy transport: its kernels, compiled for the CPU where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import kernel_runner
from dataparallel.comm.cupy import launch as cupy_kernels
from dataparallel.comm.cupy import transport
from dataparallel.comm.cupy.tables import Kernel, pack
from kernel_launches import Launches


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    if request.config.getoption("--devices") == "cuda":
        if (why_not := cupy_kernels.why_not()) is not None:
            pytest.skip(why_not)
        return cupy_kernels.launch
    compiled = kernel_runner.Kernels(tmp_path_factory.mktemp("kernels"))

    def run(kernel: Kernel, pointers: Sequence, counts: Sequence[int], device: object, others: object) -> None:
        compiled.run(pack(kernel, pointers, counts, max_blocks=7), threads=32)

    return run


@pytest.fixture
def launches(launch: Callable, monkeypatch: pytest.MonkeyPatch) -> Launches:
    replaced = Launches(launch)
    monkeypatch.setattr(transport, "launch", replaced)
    return replaced
