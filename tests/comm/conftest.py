"""Fixtures of the tests of transports. Without a GPU the cupy transport's kernels are compiled for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

import kernel_runner
from dataparallel.comm import select
from dataparallel.comm.cupy import launch as launching
from dataparallel.comm.cupy import transport
from dataparallel.comm.cupy.tables import Kernel, pack
from kernel_launches import Launches


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Other tests know nothing of what this test has made transports available for."""
    select.forget()
    yield
    select.forget()


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    if request.config.getoption("--devices") == "cuda":
        if (why_not := launching.why_not()) is not None:
            pytest.skip(why_not)
        return launching.launch
    compiled = kernel_runner.Kernels(tmp_path_factory.mktemp("kernels"))

    def run(kernel: Kernel, pointers: Sequence, counts: Sequence[int], device: object, others: object) -> None:
        compiled.run(pack(kernel, pointers, counts, max_blocks=7), threads=32)

    return run


@pytest.fixture
def launches(launch: Callable, monkeypatch: pytest.MonkeyPatch) -> Launches:
    replaced = Launches(launch)
    monkeypatch.setattr(transport, "launch", replaced)
    return replaced
