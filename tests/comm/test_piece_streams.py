"""Several streams on each device: what overlaps, and what is ordered."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from tensor_kinds import devices_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clocked import check_clocks
from dataparallel import comm
from dataparallel.comm import transport
from dataparallel.comm.routes import STAR, Chain
from dataparallel.comm.streams import current
from dataparallel.comm.streams.current import piece_streams

pytestmark = [pytest.mark.devices("sim", "stand-in")]

SIZE = 128 * 240  # divisible into 2 to 6 and 8 pieces


class Ports(TorchDispatchMode):
    """Inside, copies are counted; `steps` is when the last one is over, if each copy takes one step.

    A device sends one copy at a time and receives one. A copy starts after the work that the current streams of both
    its devices have been given, as torch orders it, and they wait for it. Everything else takes no time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.free: dict[Any, int] = defaultdict(int)
        self.copies: list[tuple[int, int, int]] = []  # sender, receiver, the step before which it starts
        ports = self

        class Stream(torch.Stream):
            def wait_stream(self, other: torch.Stream) -> None:
                ports.free[key(self)] = max(ports.free[key(self)], ports.free[key(other)])
                super().wait_stream(other)

        def noted(stream: torch.Stream) -> torch.Stream:
            return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

        current_streams, kept_stream = current.current_streams, current.kept_stream

        def currents(devices: Iterable[torch.device]) -> Mapping[torch.device, torch.Stream]:
            return {device: noted(stream) for device, stream in current_streams(devices).items()}

        monkeypatch.setattr(current, "current_streams", currents)
        monkeypatch.setattr(current, "kept_stream", lambda *which: noted(kept_stream(*which)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            target, source = args[0].device, args[1].device
            needed = [
                key(torch.accelerator.current_stream(source)),
                key(torch.accelerator.current_stream(target)),
                ("out", source),
                ("in", target),
            ]
            start = max(self.free[each] for each in needed)
            self.copies.append((source.index, target.index, start))
            self.free.update(dict.fromkeys(needed, start + 1))
        return func(*args, **(kwargs or {}))

    @property
    def steps(self) -> int:
        return max(start for *_, start in self.copies) + 1


def key(stream: torch.Stream) -> tuple[torch.device, int]:
    return stream.device, stream.stream_id


@pytest.fixture
def everyone(slots: list) -> list[torch.device]:
    devices = devices_of(slots)
    if len({*devices}) < len(devices):
        pytest.skip("slots share devices")
    return devices


def broadcast(pieces: int, everyone: list[torch.device]) -> list[Tensor]:
    source, *buffers = (torch.full((SIZE,), float(device.index), device=device) for device in everyone)
    Chain(pieces).broadcast_flat(source, buffers)
    return buffers


def add_up(pieces: int, everyone: list[torch.device], destination: int = 0) -> Tensor:
    flats = [torch.ones(SIZE, device=device) for device in everyone]
    return Chain(pieces).add_up(flats, everyone[destination])


# Steps: each is the time of one copy of a piece


@pytest.mark.slots(2, 3, 4, 5, 8)
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 8])
def test_steps_of_a_chain(pieces: int, everyone: list, monkeypatch: pytest.MonkeyPatch) -> None:
    n = len(everyone)
    with Ports(monkeypatch) as ports:
        broadcast(pieces, everyone)
    # One piece is all of the buffer, and a second stream would not help.
    assert ports.steps == n - 2 + pieces
    with Ports(monkeypatch) as ports:
        add_up(pieces, everyone)
    assert ports.steps == n - 1 + pieces


@pytest.mark.slots(3, 4, 8)
@pytest.mark.parametrize("pieces", [2, 3, 4])
@pytest.mark.parametrize("sizes", [[SIZE, SIZE], [SIZE, 1, SIZE]], ids=["large", "a small one between"])
def test_buckets_in_one_block_follow_each_other_without_a_gap(
    sizes: list[int], pieces: int, everyone: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first device sends piece after piece. A small buffer goes along the chain too: a star would begin later."""
    buckets = [
        [torch.full((size,), number + i, device=device) for i, device in enumerate(everyone)]
        for number, size in enumerate(sizes)
    ]
    with Ports(monkeypatch) as ports, piece_streams(everyone, 3):
        for (source, *buffers), size in zip(buckets, sizes, strict=True):
            (Chain(pieces) if size == SIZE else STAR).broadcast_flat(source, buffers)
    assert ports.steps == len(everyone) - 2 + pieces + pieces + sizes.count(1)
    for source, *buffers in buckets:
        assert all(torch.equal(buffer.cpu(), source.cpu()) for buffer in buffers)


def matrices_on(slots: list[torch.device]) -> list[Tensor]:
    return [torch.ones(len(slots), SIZE, device=slot) for slot in slots]


@pytest.mark.slots(4, 8)
def test_steps_of_a_sum_for_each_device(everyone: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large matrices are sent and received at the same time."""
    monkeypatch.setattr(transport, "_OVERLAP_ABOVE_BYTES", 0)
    matrices, out = matrices_on(everyone), [torch.empty(SIZE, device=device) for device in everyone]
    comm.reduce_scatter(matrices, out)  # the first call checks pairs of devices, by copies too
    with Ports(monkeypatch) as ports:
        comm.reduce_scatter(matrices, out)
    assert ports.steps <= 2 * len(everyone) - 1
    assert len(ports.copies) == len(everyone) * (len(everyone) - 1)


@pytest.mark.slots(2, 3, 4, 8)
def test_a_sum_for_each_device_needs_memory_for_one_row(everyone: list) -> None:
    """The first owner's sum begins with its own term. The others receive their first term where the sum will be."""
    asked: Counter[torch.device] = Counter()

    def empty(like: Tensor, *, device: torch.device) -> Tensor:
        asked[device] += like.numel()
        return torch.empty_like(like, device=device)

    comm.reduce_scatter(matrices_on(everyone), [torch.empty(SIZE, device=device) for device in everyone], empty)
    assert max(asked.values()) <= SIZE


# Orders


@pytest.mark.slots(3, 8)
@pytest.mark.parametrize("work", [broadcast, add_up])
def test_the_callers_streams_wait_for_everything(work, everyone: list) -> None:
    """Nothing is left on another stream when memory is used again or freed."""
    before = {device: torch.accelerator.current_stream(device) for device in everyone}
    for _ in range(3):
        result = work(3, everyone)
        for tensor in result if isinstance(result, list) else [result]:
            tensor.add_(1)
        assert {device: torch.accelerator.current_stream(device) for device in everyone} == before
    del result
    check_clocks()
