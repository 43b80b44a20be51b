"""Several streams on each device: what overlaps, what is ordered, and what is as before afterwards."""

import operator
from contextlib import nullcontext
from functools import reduce

import pytest
import torch
from ports import Ports
from tensor_kinds import devices_of, of_many_magnitudes
from torch import Tensor

from clocked import check_clocks
from dataparallel.comm.routes import TorchCopies
from dataparallel.comm.streams.current import piece_streams, shared_piece_streams, streams_set
from orders import race
from spare_streams import spare_stream

pytestmark = [pytest.mark.devices("sim", "stand-in")]

SIZE = 128 * 240  # divisible into 2 to 6 and 8 pieces


@pytest.fixture
def everyone(slots: list) -> list[torch.device]:
    devices = devices_of(slots)
    if len({*devices}) < len(devices):
        pytest.skip("slots share devices")
    return devices


def broadcast(route: str, pieces: int, everyone: list[torch.device]) -> list[Tensor]:
    source, *buffers = (torch.full((SIZE,), float(device.index), device=device) for device in everyone)
    TorchCopies(route, pieces).broadcast_flat(source, buffers)
    return buffers


def add_up(route: str, pieces: int, everyone: list[torch.device], destination: int = 0) -> Tensor:
    flats = [torch.ones(SIZE, device=device) for device in everyone]
    return TorchCopies(route, pieces).add_up(flats, everyone[destination])


# Steps: each is the time of one copy of a piece


@pytest.mark.slots(2, 3, 4, 5, 8)
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 8])
def test_steps_of_a_chain(pieces: int, everyone: list, monkeypatch: pytest.MonkeyPatch) -> None:
    n = len(everyone)
    with Ports(monkeypatch) as ports:
        broadcast("chain", pieces, everyone)
    # One piece is all of the buffer, and a second stream would not help.
    assert ports.steps == n - 2 + pieces
    with Ports(monkeypatch) as ports:
        add_up("chain", pieces, everyone)
    assert ports.steps == n - 1 + pieces


@pytest.mark.slots(2, 3, 4, 5, 8)
def test_steps_of_a_star(everyone: list, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ports(monkeypatch) as ports:
        broadcast("star", 1, everyone)
    assert ports.steps == len(everyone) - 1


@pytest.mark.slots(3, 4, 8)
@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_buckets_in_one_block_follow_each_other_without_a_gap(
    pieces: int, everyone: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first device sends piece after piece."""
    buckets = [
        [torch.full((SIZE,), number + i, device=device) for i, device in enumerate(everyone)] for number in (1, 9)
    ]
    with Ports(monkeypatch) as ports, shared_piece_streams(everyone):
        for source, *buffers in buckets:
            TorchCopies("chain", pieces).broadcast_flat(source, buffers)
    assert ports.steps == (len(everyone) - 2 + pieces) + pieces
    for source, *buffers in buckets:
        assert all(torch.equal(buffer.cpu(), source.cpu()) for buffer in buffers)


@pytest.mark.slots(4, 8)
def test_a_small_buffer_that_follows_along_a_chain_takes_one_step(
    everyone: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A star would begin when the pieces have reached the last device, and the next bucket when the star is done."""
    sizes = [SIZE, 1, SIZE]
    buckets = [
        [torch.full((size,), number + i, device=device) for i, device in enumerate(everyone)]
        for number, size in enumerate(sizes)
    ]
    with Ports(monkeypatch) as ports, shared_piece_streams(everyone, 3):
        for (source, *buffers), size in zip(buckets, sizes, strict=True):
            TorchCopies("chain" if size == SIZE else "star", 2).broadcast_flat(source, buffers)
    assert ports.steps == (len(everyone) - 2 + 2) + 1 + 2
    for source, *buffers in buckets:
        assert all(torch.equal(buffer.cpu(), source.cpu()) for buffer in buffers)


@pytest.mark.slots(3)
def test_what_a_bucket_came_on_is_told_once(everyone: list) -> None:
    buckets = [[torch.zeros(SIZE, device=device) for device in everyone] for _ in range(3)]
    with shared_piece_streams(everyone, 3) as streams:
        first, second, third = streams.of_device(everyone[1])
        expected = [[first, second], [third], [first, second, third]]
        for (source, *buffers), pieces, came_on in zip(buckets, [2, 1, 4], expected, strict=True):
            TorchCopies("chain", pieces).broadcast_flat(source, buffers)
            assert streams.take_used(everyone[1]) == came_on
        assert streams.take_used(everyone[1]) == [first]  # where work is that asks for no other
        assert streams.take_used(torch.device("cpu")) == ()


@pytest.mark.slots(4)
def test_a_block_is_for_its_devices_and_their_current_streams_only(everyone: list) -> None:
    with shared_piece_streams(everyone[:3]) as outer:
        for stream in outer.of_device(everyone[0])[:1]:
            assert stream == torch.accelerator.current_stream(everyone[0])
        with shared_piece_streams(everyone[:2]) as inner:
            assert inner is outer
        with shared_piece_streams(everyone) as inner:
            assert inner is not outer
        other = torch.Stream(everyone[0])
        with streams_set({everyone[0]: other}), shared_piece_streams(everyone[:2]) as inner:
            assert inner is not outer
        with shared_piece_streams(everyone[:2]) as inner:
            assert inner is outer
    with shared_piece_streams(everyone[:3]) as later:
        assert later is not outer
    with shared_piece_streams(everyone, 1) as none:
        assert none.of_device(everyone[0]) == ()


# Orders


@pytest.mark.slots(3)
def test_no_receive_waits_for_the_send_before_and_no_send_for_the_receive_after(
    everyone: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, middle, end = (torch.zeros(SIZE, device=device) for device in everyone)
    after: dict[tuple[int, int], list[torch.Event]] = {}  # events on the receiver's stream, piece by piece
    copy_ = Tensor.copy_

    def noting(target: Tensor, other: Tensor) -> Tensor:
        result = copy_(target, other)
        event = torch.accelerator.current_stream(target.device).record_event()
        after.setdefault((other.device.index, target.device.index), []).append(event)
        return result

    with monkeypatch.context() as inside:
        inside.setattr(Tensor, "copy_", noting)
        TorchCopies("chain", 2).broadcast_flat(source, [middle, end])
    received, sent = after[everyone[0].index, everyone[1].index], after[everyone[1].index, everyone[2].index]
    half = SIZE // 2

    def read(part: Tensor, event: torch.Event) -> None:
        reader = spare_stream(part.device)
        reader.wait_event(event)
        with reader:
            part + 1

    read(middle[half:], received[1])
    with race():
        read(end[:half], received[1])  # the first half need not be there when the second reaches the middle
    read(end[:half], sent[0])
    with race():
        read(middle[half:], sent[0])  # nor the second half in the middle when the first is at the end
    for device in everyone:
        torch.accelerator.synchronize(device)  # the readers' memory is freed only now


@pytest.mark.slots(3)
@pytest.mark.parametrize("number", [2, 3])
def test_with_three_streams_a_piece_may_arrive_before_the_last_but_one_has_left(number: int, everyone: list) -> None:
    """Pieces of different sizes get into each other's way on two."""
    source, middle, end = (torch.zeros(SIZE, device=device) for device in everyone)
    copy_, arrived = Tensor.copy_, []

    def noting(target: Tensor, other: Tensor) -> Tensor:
        result = copy_(target, other)
        if target.device == everyone[1]:
            arrived.append(torch.accelerator.current_stream(target.device).record_event())
        return result

    with pytest.MonkeyPatch.context() as inside, shared_piece_streams(everyone, number):
        inside.setattr(Tensor, "copy_", noting)
        TorchCopies("chain", 3).broadcast_flat(source, [middle, end])
    reader = spare_stream(everyone[2])
    reader.wait_event(arrived[2])
    with reader, race() if number == 3 else nullcontext():
        end[: SIZE // 3] + 1
    for device in everyone:
        torch.accelerator.synchronize(device)


@pytest.mark.slots(3, 8)
@pytest.mark.parametrize("route", ["chain", "shards"])
@pytest.mark.parametrize("work", [broadcast, add_up])
def test_the_callers_streams_wait_for_everything(work, route: str, everyone: list) -> None:
    """Nothing is left on another stream when memory is used again or freed."""
    before = {device: torch.accelerator.current_stream(device) for device in everyone}
    for _ in range(3):
        result = work(route, 3, everyone)
        for tensor in result if isinstance(result, list) else [result]:
            tensor.add_(1)
        assert {device: torch.accelerator.current_stream(device) for device in everyone} == before
    del result
    check_clocks()


@pytest.mark.slots(3)
@pytest.mark.parametrize("route", ["chain", "shards"])
def test_on_the_callers_own_streams(route: str, everyone: list) -> None:
    terms = [of_many_magnitudes(SIZE) for _ in everyone]
    streams = [torch.Stream(device) for device in everyone]
    for stream in streams:
        torch.accelerator.set_stream(stream)
    try:
        flats = [term.to(device) * 1 for term, device in zip(terms, everyone, strict=True)]
        total = TorchCopies(route, 3).add_up(flats, everyone[0]) * 1
        buffers = [torch.empty_like(total, device=device) for device in everyone[1:]]
        TorchCopies(route, 3).broadcast_flat(total, buffers)
        found = [total.cpu(), *(buffer.cpu() for buffer in buffers)]
        del flats, total, buffers
        check_clocks()
    finally:
        for device in everyone:
            torch.accelerator.set_stream(torch.get_device_module(device).default_stream(device))
    assert all(torch.equal(each, reduce(operator.add, terms)) for each in found)


@pytest.mark.slots(3)
def test_after_an_error_streams_and_device_are_as_before(everyone: list) -> None:
    before = {device: torch.accelerator.current_stream(device) for device in everyone}
    here = torch.accelerator.current_device_index()
    written = torch.zeros(3, device=everyone[1])

    def fail() -> None:
        with piece_streams(everyone) as streams:
            streams.use(everyone[1], 1)
            written.add_(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert {device: torch.accelerator.current_stream(device) for device in everyone} == before
    assert torch.accelerator.current_device_index() == here
    assert written.tolist() == [1, 1, 1]  # reads it on the caller's stream


@pytest.mark.slots(2)
def test_one_accelerator_has_nothing_to_overlap(everyone: list) -> None:
    before = torch.accelerator.current_stream(everyone[0])
    with piece_streams([everyone[0], everyone[0], torch.device("cpu")]) as streams:
        streams.use(everyone[0], 0)
        streams.use(torch.device("cpu"), 1)
        assert torch.accelerator.current_stream(everyone[0]) == before
