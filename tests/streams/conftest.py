"""Streams of the caller's, for the tests of this folder."""

from collections.abc import Iterator

import pytest
import torch

from dataparallel.testing.pytest import settle


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
        if devices[0].type == "sim":
            settle()  # before the waits below, which would hide memory that is freed too early
    finally:
        for device, stream in before.items():
            torch.accelerator.synchronize(device)
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(here)
