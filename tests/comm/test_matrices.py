"""Collectives of matrices have the bits of plain sums and copies, and each device launches few of them."""

from collections import Counter

import pytest
import torch
from ports import Ports
from torch import Tensor

from clocked import counted
from dataparallel import comm
from dataparallel.comm import matrices
from dataparallel.comm.matrices import _in_phases

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


def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of any size travel in pieces, on two streams of each device."""
    monkeypatch.setattr(matrices, "_CUT_ABOVE_BYTES", 0)
    monkeypatch.setattr(matrices, "_OVERLAP_ABOVE_BYTES", 0)


@pytest.mark.slots(2, 3, 4, 8, long=[5, 6, 7])
class TestReduceScatter:
    @pytest.fixture(autouse=True, params=["whole", "in pieces", "on two streams"])
    def pieces(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if request.param == "in pieces":
            monkeypatch.setattr(matrices, "_CUT_ABOVE_BYTES", 0)
        if request.param == "on two streams":
            large(monkeypatch)

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
        for overwrite in (False, True):
            out = [torch.full((COLUMNS,), 7.0, dtype=wide, device=slot) for slot in slots]
            with comm.using(transport=transport):
                comm.reduce_scatter(found, out, overwrite=overwrite)
            assert torch.equal(torch.stack([row.cpu() for row in out]), expected)
            assert overwrite or all(map(torch.equal, [matrix.cpu() for matrix in found], before))

    def test_some_slots_may_have_no_matrix(self, slots: list):
        found = matrices_on(slots, len(slots))
        for few in (found[1:], found[:1], found[::2]):
            out = [torch.empty(COLUMNS, device=slot) for slot in slots]
            comm.reduce_scatter([matrix.clone() for matrix in few], out)
            assert torch.equal(torch.stack([row.cpu() for row in out]), sum_of(few, torch.float32))

    def test_slots_may_share_a_device(self, slots: list, root: torch.device):
        found = [matrix.to(root) for matrix in matrices_on(slots, len(slots))]
        out = [torch.empty(COLUMNS, device=root) for _ in slots]
        comm.reduce_scatter(found, out)
        assert torch.equal(torch.stack(out).cpu(), sum_of(found, torch.float32))


@pytest.mark.devices("sim", "stand-in")
class TestOnDevices:
    @pytest.mark.slots(3, 4, 8, long=[5, 6, 7])
    @pytest.mark.parametrize("transport", [None, "host"])
    def test_all_gather_fills_all_matrices(self, slots: list, transport: str | None):
        rows = [torch.arange(5, device=slot) + 10 * at for at, slot in enumerate(slots)]
        found = [torch.empty(len(slots), 5, dtype=torch.int64, device=slot) for slot in slots]
        with comm.using(transport=transport):
            comm.all_gather(found, rows)
        expected = torch.stack([row.cpu() for row in rows])
        assert all(torch.equal(matrix.cpu(), expected) for matrix in found)

    @pytest.mark.slots(8)
    def test_launches_of_a_device_are_few(self, slots: list):
        rows = [torch.ones(5, device=slot) for slot in slots]
        found = [torch.empty(8, 5, device=slot) for slot in slots]
        with counted() as counts:
            comm.all_gather(found, rows)
        assert sum(counts.launches) <= 8 * (1 + 3 + 1)  # its own row, three rounds, and one that ends at the last row
        with counted() as counts:
            comm.reduce_scatter(found, [torch.empty(5, device=slot) for slot in slots])
        assert sum(counts.launches) <= 3 * 8

    @pytest.mark.slots(4, 8)
    def test_large_matrices_are_sent_and_received_at_the_same_time(self, slots: list, monkeypatch: pytest.MonkeyPatch):
        """A step is the time of one copy. A round of a gather is mostly one."""
        large(monkeypatch)
        count = len(slots)
        rows = [torch.ones(5, device=slot) for slot in slots]
        gathered = [torch.empty(count, 5, device=slot) for slot in slots]
        with Ports(monkeypatch) as ports:
            comm.all_gather(gathered, rows)
        assert ports.steps <= (count - 1).bit_length() + 2  # rows from the last one on to the first are two copies
        assert all(matrix.cpu().eq(1).all() for matrix in gathered)
        out = [torch.empty(COLUMNS, device=slot) for slot in slots]
        with Ports(monkeypatch) as ports:
            comm.reduce_scatter(matrices_on(slots, count), out)
        # Few devices get their rows in one step after the other. In a chain of 8, pieces of two rows follow each other.
        assert ports.steps <= (2 * count - 1 if count == 4 else (count - 1) + (4 - 1) + 2 + 2)

    @pytest.mark.slots(3, 8)
    def test_very_large_sums_go_straight_to_their_owners(self, slots: list, monkeypatch: pytest.MonkeyPatch):
        large(monkeypatch)
        monkeypatch.setattr(matrices, "_NO_CHAIN_ABOVE_BYTES", 0)
        found = matrices_on(slots, len(slots))
        expected = sum_of(found, torch.float32)
        out = [torch.empty(COLUMNS, device=slot) for slot in slots]
        with Ports(monkeypatch) as ports:
            comm.reduce_scatter(found, out)
        assert ports.steps <= 2 * len(slots) - 1
        assert len(ports.copies) == len(slots) * (len(slots) - 1)
        assert torch.equal(torch.stack([row.cpu() for row in out]), expected)

    @pytest.mark.slots(3)
    def test_rows_need_not_begin_where_pieces_do(self, slots: list, monkeypatch: pytest.MonkeyPatch):
        large(monkeypatch)
        monkeypatch.setattr(matrices, "_PIECES", 2)  # so that three devices are a chain
        for dtype in (torch.float32, torch.bfloat16):
            found = matrices_on(slots, len(slots), dtype)
            expected = sum_of(found, torch.float32)
            out = [torch.empty(COLUMNS, device=slot) for slot in slots]
            comm.reduce_scatter(found, out)
            assert torch.equal(torch.stack([row.cpu() for row in out]), expected)

    @pytest.mark.slots(4, 8)
    @pytest.mark.parametrize(
        ("dtype", "overwrite", "pieces"),
        [(torch.float32, True, 1), (torch.float32, False, 2), (torch.bfloat16, True, 2)],
        ids=str,
    )
    def test_memory_of_a_sum_is_that_of_what_is_under_way(
        self, slots: list, dtype: torch.dtype, overwrite: bool, pieces: int, monkeypatch: pytest.MonkeyPatch
    ):
        """A row on few devices. In a chain sums take the place of terms, if they may and have their dtype."""
        large(monkeypatch)
        asked: Counter[torch.device] = Counter()

        def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
            asked[device] += torch.Size(shape).numel()
            return torch.empty(shape, dtype=dtype, device=device)

        found = matrices_on(slots, len(slots), dtype)
        comm.reduce_scatter(found, [torch.empty(COLUMNS, device=slot) for slot in slots], empty, overwrite)
        if len(slots) == 4:
            assert asked == {torch.device(slot): COLUMNS for slot in slots}
        else:
            needing = slots[1:] if dtype == torch.float32 else slots
            assert asked == {torch.device(slot): pieces * len(slots) * COLUMNS // 4 for slot in needing}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("count", range(2, 17))
def test_in_a_phase_no_device_sends_and_receives(count: int):
    """Copies that share a device are launched one after the other: at most three times as many as one takes."""
    distance = 1
    while distance < count:
        receivers = [*_in_phases(count, distance)]
        assert sorted(receivers) == [*range(count)]
        ends: Counter[int] = Counter()  # how many copies a device has to wait for
        for receiver in receivers:
            pair = receiver, (receiver + distance) % count
            ends.update(dict.fromkeys({*pair}, 0))
            end = 1 + max(ends[each] for each in pair)
            ends.update({each: end - ends[each] for each in {*pair}})
        assert max(ends.values()) <= 3
        distance *= 2
