"""What the transport asks NCCL for. Buffers are on the CPU here; on GPUs it has not been run."""

import threading

import pytest
import torch
from nccl_stand_in import AS_NUMBERS, Library

from dataparallel.comm import nccl
from dataparallel.comm.nccl import Nccl, why_not
from dataparallel.comm.routes import STAR


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(nccl, "nccl", Library())
    return nccl.nccl  # type: ignore[attr-defined]


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3)
@pytest.mark.apart
def test_a_bucket_is_one_call(slots: list, root: torch.device, library: Library) -> None:
    tensors = [torch.randn(5, device=root), torch.randn(2, 3, device=root)]
    sent = Nccl(sums=False).broadcast_coalesced(tensors, slots, 2**20, own=False)
    assert library.calls == [("broadcast", 3, 0)]
    for slot, on_slot in zip(slots, sent, strict=True):
        for copy, tensor in zip(on_slot, tensors, strict=True):
            assert copy.device == slot
            assert torch.equal(copy.to(root), tensor)


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3)
@pytest.mark.apart
@pytest.mark.parametrize("sums", [False, True])
def test_sums_are_its_own_only_where_their_order_does_not_matter(sums: bool, slots: list, library: Library) -> None:
    inputs = [[torch.full((4,), float(k + 1), device=slot)] for k, slot in enumerate(slots)]
    (total,) = Nccl(sums).reduce_add_coalesced(inputs, slots[0], 2**20)
    assert torch.equal(total.cpu(), torch.full((4,), 6.0))
    assert total.device == slots[0]
    assert library.calls == ([("reduce", 3, 0)] if sums else [])


DTYPES = [getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
ON_TENSORS = [dtype for dtype in {*DTYPES} if not str(dtype).startswith(("torch.q", "torch.bits"))]


@pytest.mark.filterwarnings("ignore:ComplexHalf|BComplex32")
@pytest.mark.parametrize("dtype", sorted(ON_TENSORS, key=str), ids=str)
@pytest.mark.devices("cpu")
def test_bytes_of_every_dtype_arrive(dtype: torch.dtype, library: Library) -> None:
    data = torch.arange(3 * dtype.itemsize, dtype=torch.uint8)
    buffers = [torch.zeros_like(data).view(dtype) for _ in range(2)]
    Nccl(sums=False).broadcast_flat(data.view(dtype), buffers)
    assert all(torch.equal(buffer.view(torch.uint8), data) for buffer in buffers)
    assert library.calls == [("broadcast", 3, 0)]


SUMS = [
    *AS_NUMBERS,
    *(torch.int16, torch.bool),
    *(torch.complex64, torch.complex128),
]


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("dtype", sorted(SUMS, key=str), ids=str)
def test_what_nccl_cannot_add_plain_copies_add(dtype: torch.dtype, library: Library) -> None:
    flats = [torch.tensor([1, 0, 3]).to(dtype), torch.tensor([1, 0, 4]).to(dtype)]
    total = Nccl(sums=True).add_up([flat.clone() for flat in flats], torch.device("cpu"))
    assert total.dtype == dtype
    assert torch.equal(total, STAR.add_up(flats, torch.device("cpu")))
    assert library.calls == ([("reduce", 2, 0)] if dtype in AS_NUMBERS else [])


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3)
@pytest.mark.parametrize("case", ["nccl", "in slot order", "wider rows", "a slot brings nothing", "int16"])
def test_rows_are_summed_by_one_launch_if_each_device_has_a_matrix_and_a_row(
    case: str, slots: list, library: Library
) -> None:
    dtype = torch.int16 if case == "int16" else torch.float32
    matrices = [torch.arange(6, device=slot).view(3, 2).to(dtype) + at for at, slot in enumerate(slots)]
    wide = torch.float64 if case == "wider rows" else dtype
    out = [torch.empty(2, dtype=wide, device=slot) for slot in slots]
    if case == "a slot brings nothing":
        del matrices[1]
    Nccl(sums=case != "in slot order").reduce_scatter(matrices, out)
    total = torch.stack([matrix.to(slots[0]).to(wide) for matrix in matrices]).sum(0)
    for row, found in zip(total, out, strict=True):
        assert torch.equal(found.to(slots[0]), row)
    assert library.calls == ([("reduce_scatter", 3, -1)] if case == "nccl" else [])


def test_what_is_written_has_changed_for_autograd(library: Library) -> None:
    target, weight = torch.zeros(3), torch.ones(3, requires_grad=True)
    loss = (weight * target).sum()
    Nccl(sums=False).broadcast_flat(torch.ones(3), [target])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_to_send_is_no_call(library: Library) -> None:
    Nccl(sums=False).broadcast_flat(torch.zeros(3), [])
    assert library.calls == []


def test_one_thread_launches_at_a_time(library: Library) -> None:
    def launch() -> None:
        for _ in range(20):
            Nccl(sums=True).broadcast_flat(torch.zeros(1), [torch.ones(1)])
            Nccl(sums=True).add_up([torch.zeros(1)] * 2, torch.device("cpu"))

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.calls) == 160
    assert not library.crowded


def test_without_nccl_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_nccl_broadcast", print, raising=False)
    assert why_not() is None
    monkeypatch.delattr(torch._C, "_nccl_broadcast")
    assert why_not() == "this build of torch has no NCCL"
