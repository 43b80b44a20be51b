"""The stand-ins do what the primitives of ``torch.nn.parallel`` do. Nothing is timed here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from places import Places
from torch_pipeline import StandIns

PRIMITIVES = ("_broadcast_coalesced", "_scatter", "_gather")


@pytest.fixture
def devices(places: Places) -> list[torch.device]:
    if not places.simulated:
        pytest.skip(places.why_not_simulated)
    return places.simulated[:3]


@pytest.fixture
def stand_ins(devices: list[torch.device]) -> Iterator[StandIns]:
    stand_ins = StandIns(devices[0].type)
    with stand_ins.installed():
        yield stand_ins


def broadcast(tensors: list[Tensor], devices: list[torch.device], size: int = 100) -> list[list[Tensor]]:
    return torch._C._broadcast_coalesced(tensors, [device.index for device in devices], size)


class TestInstalled:
    def test_is_taken_out_again(self) -> None:
        before = [getattr(torch._C, name, None) for name in PRIMITIVES]

        def fail() -> None:
            assert None not in [getattr(torch._C, name, None) for name in PRIMITIVES]
            raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"), StandIns("sim").installed():
            fail()
        assert [getattr(torch._C, name, None) for name in PRIMITIVES] == before


class TestBroadcast:
    def test_order_and_values_of_mixed_dtypes(self, stand_ins: StandIns, devices: list[torch.device]) -> None:
        dtypes = [torch.float32, torch.float64, torch.int64] * 20
        tensors = [torch.full((k % 5, 3), k, dtype=dtype, device=devices[0]) for k, dtype in enumerate(dtypes)]
        for device, copies in zip(devices, broadcast(tensors, devices), strict=True):
            for tensor, sent in zip(tensors, copies, strict=True):
                assert sent.device == device
                assert sent.dtype == tensor.dtype
                assert torch.equal(sent.cpu(), tensor.cpu())

    def test_copies_count_their_versions_apart(self, stand_ins: StandIns, devices: list[torch.device]) -> None:
        first, second = broadcast([torch.ones(3, device=devices[0]), torch.ones(2, device=devices[0])], devices)[1]
        first.add_(1)
        assert (first._version, second._version) == (1, 0)
        assert second.tolist() == [1, 1]


class TestScatterAndGather:
    @pytest.mark.parametrize("dim", [0, 1])
    @pytest.mark.parametrize("on_cpu", [False, True])
    def test_there_and_back(self, stand_ins: StandIns, devices: list[torch.device], dim: int, on_cpu: bool) -> None:
        whole = torch.arange(30.0).view(5, 6)
        source = whole if on_cpu else whole.to(devices[0])
        chunks = nn.parallel.comm.scatter(source, [device.index for device in devices], dim=dim)
        assert [chunk.device for chunk in chunks] == devices
        for chunk, expected in zip(chunks, whole.chunk(3, dim), strict=True):
            assert torch.equal(chunk.cpu(), expected)
        for destination, device in ((1, devices[1]), ("cpu", torch.device("cpu"))):
            gathered = nn.parallel.comm.gather(chunks, dim, destination)
            assert gathered.device == device
            assert torch.equal(gathered.cpu(), whole)
