"""What devices have in memory before, after, and at most inside of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataparallel.tracing import block
from dataparallel.tracing.block import MemoryBefore

MIB = 2**20


@pytest.mark.devices("sim", "cuda")
def test_bytes_of_each_device(slots: list) -> None:
    devices = [torch.device(slot) for slot in slots]
    kept = torch.empty(MIB, dtype=torch.uint8, device=devices[1])
    larger = torch.empty(9 * MIB, dtype=torch.uint8, device=devices[1])
    del larger  # a peak from before the block
    before = MemoryBefore()
    at_most = torch.empty(3 * MIB, dtype=torch.uint8, device=devices[1])
    del at_most
    stays = torch.empty(2 * MIB, dtype=torch.uint8, device=devices[1])
    found = before.until_now([devices[0], devices[1], devices[1]])
    assert [one.device for one in found] == devices[:2]
    assert [one.slots for one in found] == [(0,), (1, 2)]
    second = found[1]
    assert second.after - second.before == 2 * MIB
    assert second.peak - second.before == 3 * MIB
    assert second.before >= MIB
    assert found[0].before == found[0].after == found[0].peak
    del kept, stays


def test_there_is_no_figure_for_cpu_slots() -> None:
    assert MemoryBefore().until_now([torch.device("cpu")] * 2) == []


def test_a_backend_that_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: Any) -> Any:
        raise RuntimeError("no allocator that counts")

    device = torch.device("meta", 0)
    monkeypatch.setattr(block, "all_devices", lambda: [device])
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", fails)
    assert MemoryBefore().until_now([device]) == []
