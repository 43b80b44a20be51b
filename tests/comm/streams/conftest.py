"""Streams of the caller's, and wrappers with small buckets, for the tests of this folder."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from clocked import check_clocks
from dataparallel import DataParallel
from dataparallel.comm.streams import ahead
from dataparallel.composable import replicate


@pytest.fixture
def side_streams(slots: list) -> Iterator[dict[torch.device, torch.Stream]]:
    """On every device a stream of the caller's is current. Afterwards all are done."""
    devices = [torch.device(slot) for slot in dict.fromkeys(slots)]
    here = torch.accelerator.current_device_index()
    before = {device: torch.accelerator.current_stream(device) for device in devices}
    streams = {device: torch.Stream(device) for device in devices}
    for device, stream in streams.items():
        stream.wait_stream(before[device])
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(here)
    yield streams
    try:
        check_clocks()  # before the waits below, which would hide memory that is freed too early
    finally:
        for device, stream in before.items():
            torch.accelerator.synchronize(device)
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(here)


@pytest.fixture
def copy_streams(monkeypatch: pytest.MonkeyPatch) -> list[torch.Stream]:
    """The streams on which chunks have been copied, one for each copy."""
    streams: list[torch.Stream] = []
    real = ahead._copy_of

    def copy_of(pinned: Tensor, device: torch.device) -> Tensor:
        streams.append(torch.accelerator.current_stream(device))
        return real(pinned, device)

    monkeypatch.setattr(ahead, "_copy_of", copy_of)
    return streams


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have compiled something in this process. Nothing here is compiled."""
    monkeypatch.setattr("dataparallel._torch.note_whether_compiler_is_in_use", lambda: False)


@pytest.fixture(params=["DataParallel", "replicate"])
def form(request: pytest.FixtureRequest) -> Callable[..., nn.Module]:
    """A function that wraps a module so that each parameter is a bucket."""

    def wrap(model: nn.Module, slots: list) -> nn.Module:
        if request.param == "DataParallel":
            return DataParallel(model, slots, bucket_cap_mb=1e-9, workers=len(slots))
        return replicate(model, devices=slots, bucket_cap_mb=1e-9, first_bucket_mb=1e-9)

    return wrap
