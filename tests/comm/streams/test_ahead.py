"""Copies on side streams are ordered against the streams that use their memory.

Clocks show a missing order in every run, GPUs only as wrong numbers now and then. The values of chunks are tested in
``test_prefetch``.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from clocked import check_clocks
from dataparallel import DataParallel, prefetch, scatter, whole
from dataparallel.comm.streams.ahead import can_be_sent
from echo import left_behind

pytestmark = pytest.mark.devices("sim", "cuda")


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def pinned(count: int = 4) -> list[Tensor]:
    return [torch.full((8, 3), float(k + 1)).pin_memory() for k in range(count)]


def settled(slots: list) -> None:
    """Waits for all devices, and checks that no freed memory is used any more."""
    for slot in slots:
        check_clocks()
        torch.accelerator.synchronize(slot)


@pytest.fixture
def elsewhere(slots: list) -> Iterator[dict[torch.device, torch.Stream]]:
    """A new stream on every device. None of them is current."""
    streams, device = {slot: torch.Stream(slot) for slot in slots}, torch.accelerator.current_device_index()
    yield streams
    for stream in streams.values():
        stream.synchronize()
    torch.accelerator.set_device_index(device)  # setting a stream makes its device current


@pytest.mark.devices("sim", "stand-in")
def test_memory_of_chunks_is_used_again_after_the_work_that_used_it(slots: list) -> None:
    """It belongs to the side stream, which does not wait for that work."""
    for x in pinned(3):
        for chunk in scatter(x, slots):
            chunk.mul_(2)
        del chunk
        check_clocks()
    settled(slots)


def test_a_call_on_other_streams_than_the_loops(slots: list, elsewhere: dict) -> None:
    """The call's streams wait for the copies. The memory returns to the side streams when the call's work is done."""
    model = DataParallel(Doubles(), slots)
    before = {slot: torch.accelerator.current_stream(slot) for slot in slots}
    for x in prefetch(pinned(), model):
        for slot, stream in elsewhere.items():
            stream.wait_stream(before[slot])
            torch.accelerator.set_stream(stream)
        output = model(x)
        for stream in before.values():
            torch.accelerator.set_stream(stream)
        check_clocks()  # the chunks have been freed
        with elsewhere[slots[0]]:
            assert torch.equal(output.cpu(), x * 2)
    for slot, stream in elsewhere.items():
        before[slot].wait_stream(stream)


@pytest.mark.devices("sim", "stand-in")
def test_chunks_that_nobody_takes_are_freed_behind_their_copies(slots: list) -> None:
    for _ in prefetch(pinned(), DataParallel(Doubles(), slots)):
        settled(slots)


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.apart(8)
def test_a_batch_is_the_loaders_again_when_the_next_is_asked_for(slots: list) -> None:
    """The loader fills a ring of pinned buffers from another device, whose streams are not ordered after the copies."""
    camera = torch.device(7)
    ring = [torch.empty(8, 3).pin_memory() for _ in range(2)]  # depth + 1: one is the loop's, the next is sent

    def loader() -> Iterator[Tensor]:
        for k in range(9):
            buffer = ring[k % 2]
            with torch.no_grad():
                buffer.copy_(torch.full((8, 3), float(k), device=camera), non_blocking=True)
            torch.accelerator.current_stream(camera).synchronize()
            yield buffer

    for k, x in enumerate(prefetch(loader(), DataParallel(Doubles(), slots))):
        assert torch.equal(x, torch.full((8, 3), float(k)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward_ad
def test_a_tangent_is_not_lost_on_the_way(make_slots: Callable[[int], list]) -> None:
    """Copies in no graph would drop it. A scatter cannot carry it either, nor can replicas, and a call says so."""
    for count, error, text in ((1, NotImplementedError, "jvp"), (2, RuntimeError, "dual_level")):
        for recorded in (True, False):
            with forward_ad.dual_level(), torch.set_grad_enabled(recorded):
                x = forward_ad.make_dual(torch.ones(4, 3), torch.ones(4, 3))
                assert not can_be_sent(x)
                assert forward_ad.unpack_dual(whole(x)).tangent is not None
                with pytest.raises(error, match=text):
                    DataParallel(Doubles(), make_slots(count))(x)


def test_a_call_sends_its_batch_to_all_slots_at_once(slots: list, copy_streams: list[torch.Stream]) -> None:
    """Pinned and pageable memory, on side streams. After the scatter the caller may write to the batch again."""
    before = {torch.accelerator.current_stream(slot) for slot in slots}
    for pin_memory in (False, True):
        x = torch.arange(12.0, pin_memory=pin_memory).reshape(6, 2)
        table = whole(torch.arange(3.0))
        parts = scatter({"x": x, "again": [x], "table": table}, slots)
        x.fill_(-1)
        table.fill_(-1)
        assert torch.cat([part["x"].cpu() for part in parts]).tolist() == torch.arange(12.0).reshape(6, 2).tolist()
        assert all(part["again"][0] is part["x"] for part in parts)
        assert all(part["table"].tolist() == [0, 1, 2] for part in parts)
    assert len(copy_streams) == 2 * (len(slots) + len({*slots}))  # a table goes to each device once
    assert not {*copy_streams} & before
    assert left_behind() == 0


def test_a_call_that_cannot_be_scattered_leaves_nothing_on_its_way(slots: list) -> None:
    x, y = torch.arange(6.0), torch.arange(5.0)
    with pytest.raises(ValueError, match="batch sizes"):
        scatter([x, y], slots)
    assert left_behind() == 0
