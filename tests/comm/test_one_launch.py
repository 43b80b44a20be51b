"""Results of the cupy transport are those of plain copies, whatever its kernels leave. torch plays the kernels here."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.comm import carriers, copies, one_launch
from dataparallel.comm.routes import summed_in

pytestmark = [pytest.mark.usefixtures("one_intra_op_thread"), pytest.mark.slots(3)]


class Kernels:
    """In the place of ``cupy_kernels``; leaves every ``leaves``-th position, and notes its launches."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self.launches: list[tuple[str, int, int]] = []

    def _positions(self, count: int) -> tuple[list[int], list[int]]:
        left = [k for k in range(count) if self.leaves and k % self.leaves == 0]
        return [k for k in range(count) if k not in left], left

    def copy_many(self, sources: Sequence[Tensor], destinations: Sequence[Sequence[Tensor]]) -> list[int]:
        self.launches.append(("copy", len(sources), len(destinations)))
        taken, left = self._positions(len(sources))
        for row in destinations:
            for k in taken:
                assert row[k].stride() == sources[k].stride() or not sources[k].is_contiguous()
                row[k].copy_(sources[k])
        return left

    def sum_many(self, slots: Sequence[Sequence[Tensor]], out: Sequence[Tensor]) -> list[int]:
        self.launches.append(("sum", len(out), len(slots)))
        taken, left = self._positions(len(out))
        for k in taken:
            total = slots[0][k].to(out[k].device, summed_in(out[k].dtype))
            for tensors in slots[1:]:
                total = total + tensors[k].to(out[k].device)
            out[k].copy_(total)
        return left


@pytest.fixture(params=[0, 1, 2], ids=["leaves nothing", "leaves all", "leaves half"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setattr(one_launch, "cupy_kernels", Kernels(request.param))
    return one_launch.cupy_kernels  # type: ignore[attr-defined]


def made(device: torch.device | str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 3, generator=generator) for _ in range(4)]
    tensors += [torch.randn(5, 4, generator=generator).t(), torch.randn(1, generator=generator).expand(6)]
    tensors += [torch.arange(7), torch.eye(3).to_sparse(), torch.randn(9, generator=generator).to(torch.bfloat16)]
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("own", [False, True])
def test_a_broadcast(own: bool, kernels: Kernels, slots: list, root: torch.device) -> None:
    devices = [*map(torch.device, slots), root, torch.device(slots[-1])]
    tensors = made(root)
    results = one_launch.broadcast_coalesced(tensors, devices, own=own)
    expected = copies.broadcast_coalesced(tensors, devices, 2**20, own=own)
    for slot, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
        for copy, other, tensor in zip(mine, theirs, tensors, strict=True):
            assert (copy.device, copy.dtype, copy.shape) == (other.device, other.dtype, other.shape)
            assert torch.equal(copy.to_dense().cpu(), tensor.to_dense().cpu())
            if slot == 0:
                assert copy is tensor
    if own:
        for position in range(len(tensors)):
            storages = [(r[position]._values() if r[position].is_sparse else r[position]) for r in results]
            assert len({storage.untyped_storage().data_ptr() for storage in storages}) == len(devices)
    if own or len({*devices}) > 1:
        assert len(kernels.launches) == 3, "one for each dtype"


def test_a_sum(kernels: Kernels, slots: list, root: torch.device) -> None:
    inputs = [[tensor * (k + 1) for tensor in made(slot)] for k, slot in enumerate(slots)]
    totals = one_launch.reduce_add_coalesced(inputs, root)
    expected = copies.reduce_add_coalesced(inputs, root, 2**20)
    for total, other in zip(totals, expected, strict=True):
        assert (total.device, total.dtype, total.shape) == (other.device, other.dtype, other.shape)
        assert torch.equal(total.to_dense().cpu(), other.to_dense().cpu())
    assert len(kernels.launches) == 3


def test_one_slot_is_no_launch(kernels: Kernels, root: torch.device) -> None:
    tensors = made(root)
    totals = one_launch.reduce_add_coalesced([tensors], root)
    assert all(total is tensor for total, tensor in zip(totals, tensors, strict=True))
    assert kernels.launches == []


@pytest.mark.devices("sim")
def test_comm_uses_it_where_it_is_asked_for(kernels: Kernels, slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "carrier_for", lambda work, devices, tensors: carriers.KERNELS)
    comm.broadcast_coalesced(made(slots[0]), slots)
    comm.reduce_add_coalesced([made(slot) for slot in slots])
    assert [kind for kind, *_ in kernels.launches] == ["copy"] * 3 + ["sum"] * 3
