"""Sums of matrices, a row for each device, have the bits of plain sums. All links are busy, and memory is a row."""

from collections import Counter

import pytest
import torch
from ports import Ports
from torch import Tensor

from dataparallel import comm
from dataparallel.comm import transport

COLUMNS = 24


def matrices_on(slots: list, rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Their sums differ with the order."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.tensor([10.0 ** (3 * (slot % 3)) for slot in range(len(slots))])
    values = torch.randn(len(slots), rows, COLUMNS, generator=generator) * powers[:, None, None]
    return [value.to(dtype).to(slot) for value, slot in zip(values, slots, strict=True)]


def sum_of(found: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = found[0].cpu().to(dtype)
    for matrix in found[1:]:
        total = total + matrix.cpu()
    return total


@pytest.fixture(params=["on one stream", "on two streams"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device sends small matrices on the stream on which it receives, and large ones on another."""
    if request.param == "on two streams":
        monkeypatch.setattr(transport, "_OVERLAP_ABOVE_BYTES", 0)


@pytest.mark.slots(2, 3, 4, 8, long=[5, 6, 7])
@pytest.mark.usefixtures("streams")
class TestReduceScatter:
    @pytest.mark.parametrize(
        ("dtype", "wide"),
        [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
        ids=str,
    )
    @pytest.mark.parametrize("transport", [None, "host"])
    def test_adds_in_slot_order(self, slots: list, dtype: torch.dtype, wide: torch.dtype, transport: str | None):
        found = matrices_on(slots, len(slots), dtype)
        expected = sum_of(found, wide)
        before = [matrix.cpu() for matrix in found]
        out = [torch.full((COLUMNS,), 7.0, dtype=wide, device=slot) for slot in slots]
        with comm.using(transport=transport):
            comm.reduce_scatter(found, out)
        assert torch.equal(torch.stack([row.cpu() for row in out]), expected)
        assert all(map(torch.equal, [matrix.cpu() for matrix in found], before))

    def test_some_slots_may_have_no_matrix(self, slots: list):
        found = matrices_on(slots, len(slots))
        for few in (found[1:], found[:1], found[::2]):
            out = [torch.empty(COLUMNS, device=slot) for slot in slots]
            comm.reduce_scatter(few, out)
            assert torch.equal(torch.stack([row.cpu() for row in out]), sum_of(few, torch.float32))

    def test_slots_may_share_a_device(self, slots: list, root: torch.device):
        found = [matrix.to(root) for matrix in matrices_on(slots, len(slots))]
        out = [torch.empty(COLUMNS, device=root) for _ in slots]
        comm.reduce_scatter(found, out)
        assert torch.equal(torch.stack(out).cpu(), sum_of(found, torch.float32))

    def test_a_device_needs_memory_for_one_row(self, slots: list):
        asked: Counter[torch.device] = Counter()

        def empty(like: Tensor, *, device: torch.device) -> Tensor:
            asked[device] += like.numel()
            return torch.empty_like(like, device=device)

        comm.reduce_scatter(
            matrices_on(slots, len(slots)), [torch.empty(COLUMNS, device=slot) for slot in slots], empty
        )
        # The first owner's sum begins with its own term. The others receive their first term where the sum will be.
        most = 0 if len({*slots}) == 1 else COLUMNS
        assert all(numel <= most for numel in asked.values())


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.slots(4, 8)
def test_large_matrices_are_sent_and_received_at_the_same_time(slots: list, monkeypatch: pytest.MonkeyPatch):
    """A step is the time of one copy."""
    monkeypatch.setattr(transport, "_OVERLAP_ABOVE_BYTES", 0)
    with Ports(monkeypatch) as ports:
        comm.reduce_scatter(matrices_on(slots, len(slots)), [torch.empty(COLUMNS, device=slot) for slot in slots])
    assert ports.steps <= 2 * len(slots) - 1
    assert len(ports.copies) == len(slots) * (len(slots) - 1)
