"""What the transport asks NCCL for. Buffers are on the CPU here; on GPUs it has not been run."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.comm import copies, nccl
from dataparallel.comm.nccl import Nccl, why_not

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Library:
    """In the place of ``torch.cuda.nccl``; notes calls, and whether two threads are inside at the same time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.inside = 0
        self.crowded = False

    def __enter__(self) -> None:
        self.inside += 1
        self.crowded |= self.inside > 1
        threading.Event().wait(0.001)  # others would come in now

    def __exit__(self, *_: object) -> None:
        self.inside -= 1

    def broadcast(self, inputs: list[Tensor], root: int) -> None:
        with self:
            self.calls.append(("broadcast", len(inputs), root))
            for target in inputs:
                target.copy_(inputs[root])

    def reduce(self, inputs: list[Tensor], output: Tensor, root: int) -> None:
        with self:
            self.calls.append(("reduce", len(inputs), root))
            assert output.device == inputs[root].device
            output.copy_(sum(tensor.to(output.device) for tensor in inputs))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(nccl, "nccl", Library())
    return nccl.nccl  # type: ignore[attr-defined]


@pytest.mark.not_isolated("distinct devices")
@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3)
def test_a_bucket_is_one_call(slots: list, root: torch.device, library: Library) -> None:
    tensors = [torch.randn(5, device=root), torch.randn(2, 3, device=root)]
    sent = copies.broadcast_coalesced(tensors, slots, 2**20, own=False, carrier=Nccl(sums=False))
    assert library.calls == [("broadcast", 3, 0)]
    for slot, on_slot in zip(slots, sent, strict=True):
        for copy, tensor in zip(on_slot, tensors, strict=True):
            assert copy.device == slot
            assert torch.equal(copy.to(root), tensor)


@pytest.mark.not_isolated("distinct devices")
@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3)
@pytest.mark.parametrize("sums", [False, True])
def test_sums_are_its_own_only_where_their_order_does_not_matter(sums: bool, slots: list, library: Library) -> None:
    inputs = [[torch.full((4,), float(k + 1), device=slot)] for k, slot in enumerate(slots)]
    (total,) = copies.reduce_add_coalesced(inputs, slots[0], 2**20, Nccl(sums))
    assert torch.equal(total.cpu(), torch.full((4,), 6.0))
    assert total.device == slots[0]
    assert library.calls == ([("reduce", 3, 0)] if sums else [])


def test_nothing_to_send_is_no_call(library: Library) -> None:
    Nccl(sums=False).spread(torch.zeros(3), [])
    assert library.calls == []


def test_one_thread_launches_at_a_time(library: Library) -> None:
    def launch() -> None:
        for _ in range(20):
            Nccl(sums=True).spread(torch.zeros(1), [torch.ones(1)])
            Nccl(sums=True).add_up([torch.zeros(1)] * 2, torch.device("cpu"))

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.calls) == 160
    assert not library.crowded


def test_what_it_cannot_serve() -> None:
    def cuda(*indices: int) -> list[Any]:
        return [torch.device("cuda", index) for index in indices]

    assert "not cpu" in str(why_not([*cuda(0), torch.device("cpu")]))
    assert "each device once" in str(why_not(cuda(0, 1, 0)))
    expected = None if hasattr(torch._C, "_nccl_broadcast") else "this build of torch has no NCCL"
    assert why_not(cuda(0, 1)) == expected
