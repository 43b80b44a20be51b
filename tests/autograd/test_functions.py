"""Broadcast, ReduceAddCoalesced, Scatter and Gather are as differentiable as one device would be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint  # without it the CPU generator has not to be restored
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from dataparallel.autograd.functions import (
    Broadcast,
    Collect,
    Gather,
    ReduceAddCoalesced,
    Scatter,
    restore_after_backward,
)

on_a_single_slot = pytest.mark.parametrize(
    "function",
    [
        lambda root, tensor: Broadcast.apply([root], tensor)[0],
        lambda root, tensor: ReduceAddCoalesced.apply(root, 1, tensor)[0],
        lambda root, tensor: Scatter.apply([root], None, 0, tensor)[0],
        lambda root, tensor: Gather.apply(root, 0, tensor),
    ],
    ids=["Broadcast", "ReduceAddCoalesced", "Scatter", "Gather"],
)


def leaf(*shape: int, device: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)


def leaves(slots: list, *shape: int) -> list[Tensor]:
    return [leaf(*shape, device=slot) for slot in slots]


def assert_twice_differentiable(function: Callable, *inputs: Tensor) -> None:
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


# First and second derivatives


def test_broadcast_is_twice_differentiable(slots: list, root: torch.device) -> None:
    tensors = leaf(2, device=root), leaf(2, 2, device=root, dtype=torch.complex128)
    assert_twice_differentiable(lambda *tensors: Broadcast.apply(["cpu", *slots], *tensors), *tensors)


def test_reduce_add_coalesced_is_twice_differentiable(slots: list, root: torch.device) -> None:
    terms = [term for slot in ["cpu", *slots] for term in (leaf(2, device=slot), leaf(1, 2, device=slot))]
    assert_twice_differentiable(lambda *terms: ReduceAddCoalesced.apply(root, 2, *terms), *terms)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("sizes", [None, [1, 0, 3]], ids=["near-equal", "given sizes"])
def test_scatter_is_twice_differentiable(slots: list, root: torch.device, dim: int, sizes: list | None) -> None:
    shape = (4, 2) if dim == 0 else (2, 4)
    assert_twice_differentiable(lambda tensor: Scatter.apply(slots, sizes, dim, tensor), leaf(*shape, device=root))


@pytest.mark.parametrize("dim", [0, -1])
def test_gather_is_twice_differentiable(slots: list, root: torch.device, dim: int) -> None:
    chunks = [leaf(*((rows, 2) if dim == 0 else (2, rows)), device=slot) for rows, slot in enumerate(slots)]
    assert_twice_differentiable(lambda *chunks: Gather.apply(root, dim, *chunks), *chunks)


def test_gather_of_numbers_is_a_twice_differentiable_vector(slots: list, root: torch.device) -> None:
    numbers = leaves(slots)
    vector = Gather.apply(root, 5, *numbers)
    assert vector.tolist() == [number.item() for number in numbers]
    assert_twice_differentiable(lambda *numbers: Gather.apply(root, 0, *numbers), *numbers)


# Which gradients there are


def test_a_gradient_is_none_exactly_where_no_slot_has_one(slots: list, root: torch.device) -> None:
    all_use, some_use, none_use = (leaf(2, device=root) for _ in range(3))
    outputs = Broadcast.apply(slots, all_use, some_use, none_use)
    on_slots = [outputs[k : k + 3] for k in range(0, len(outputs), 3)]
    losses = [on_slot[0].sum() * (k + 1) for k, on_slot in enumerate(on_slots)]
    losses += [on_slot[1].sum() * (k + 1) for k, on_slot in enumerate(on_slots) if k != 1]
    sum(loss.to(root) for loss in losses).backward()
    assert all_use.grad.tolist() == [6.0] * 2
    assert some_use.grad.tolist() == [4.0] * 2
    assert none_use.grad is None


@pytest.mark.parametrize("create_graph", [False, True])
def test_an_undefined_gradient_stays_undefined(slots: list, root: torch.device, create_graph: bool) -> None:
    """Through every function, an unused tensor has no gradient instead of zeros."""
    used, unused = leaves([root, root], 4)
    idle = Gather.apply(root, 0, *Scatter.apply(slots, None, 0, Broadcast.apply(slots, unused)[0]))
    (idle,) = ReduceAddCoalesced.apply(root, 1, idle, idle)
    total, _ = ReduceAddCoalesced.apply(root, 2, *[tensor for _ in slots for tensor in (used, idle)])
    grads = torch.autograd.grad(total.sum(), [used, unused], allow_unused=True, create_graph=create_graph)
    assert grads[0].tolist() == [len(slots)] * 4
    assert grads[1] is None


def test_what_needs_no_gradient_gets_none(slots: list, root: torch.device) -> None:
    weight, buffer, count = leaf(2, device=root), torch.randn(2, device=root), torch.tensor([3], device=root)
    outputs = Broadcast.apply(slots, weight, buffer, count)
    assert [output.requires_grad for output in outputs] == [True, False, False] * len(slots)
    assert all(torch.equal(output.to(root), count) for output in outputs[2::3])
    batch = torch.arange(6, device=root)
    whole = Gather.apply(root, 0, *Scatter.apply(slots, None, 0, batch))
    assert torch.equal(whole, batch)
    assert not whole.requires_grad
    (total,) = ReduceAddCoalesced.apply(root, 1, *[torch.tensor([2], device=slot) for slot in slots])
    assert total.tolist() == [2 * len(slots)]
    total, counted = ReduceAddCoalesced.apply(root, 2, *[tensor for _ in slots for tensor in (weight, count)])
    assert (total.requires_grad, counted.requires_grad) == (True, False)


@pytest.mark.parametrize("dense_slot", [None, 0, 2])
def test_sparse_gradients_add_up(slots: list, root: torch.device, dense_slot: int | None) -> None:
    table = leaf(5, 2, device=root)
    loss: Any = 0
    for k, replica in enumerate(Broadcast.apply(slots, table)):
        rows = F.embedding(torch.tensor([k, 1], device=replica.device), replica, sparse=True)
        loss = loss + (replica if k == dense_slot else rows).sum().to(root)
    loss.backward()
    assert table.grad.is_sparse == (dense_slot is None)
    expected = sum(1 if k == dense_slot else torch.tensor([k, 1]).bincount(minlength=5) for k in range(len(slots)))
    assert table.grad.to_dense()[:, 0].tolist() == expected.tolist()


# Memory and version counters


@on_a_single_slot
def test_a_single_slot_keeps_gradients_apart(root: torch.device, function: Callable) -> None:
    """A tensor that is passed through shares its ``.grad`` neither with another one nor with the caller's gradient."""
    source, other, gradient = leaf(2, device=root), leaf(2, device=root), torch.ones(2, device=root).double()
    (function(root, source) + other).backward(gradient)
    source.grad.zero_()
    assert other.grad.tolist() == gradient.tolist() == [1.0] * 2
    assert function(root, source) is not source


def test_chunks_may_be_changed_in_place(slots: list, root: torch.device) -> None:
    """As on one device the change reaches the memory of the batch, and autograd knows it."""
    source = leaf(6, device=root)
    batch = source * 1
    chunks = Scatter.apply(slots, None, 0, batch)
    for chunk in chunks:
        chunk.mul_(3)
    Gather.apply(root, 0, *chunks).sum().backward()
    assert source.grad.tolist() == [3.0] * 6


def test_a_batch_changed_between_forward_and_backward_is_noticed(slots: list, root: torch.device) -> None:
    batch, weight = torch.ones(6, device=root).double(), leaf(1, device=root)
    loss = (Scatter.apply(slots, None, 0, batch)[0] * weight).sum()
    batch.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_chunks_have_holes_only_if_the_batch_has_some(slots: list, root: torch.device) -> None:
    """On each slot, also where a chunk need not move. cuDNN refuses the state of an LSTM that has holes."""
    state = torch.arange(36.0, dtype=torch.float64, device=root).view(2, 6, 3)
    for dim, batch in ((1, state), (0, state.transpose(0, 1))):
        for apply in (Scatter.apply, Scatter.unrecorded):
            for chunk in apply(slots, None, dim, batch):
                assert (chunk if dim else chunk.transpose(0, 1)).is_contiguous()
        recorded = batch.detach().requires_grad_()
        sum(chunk.to(root).square().sum() for chunk in Scatter.apply(slots, None, dim, recorded)).backward()
        torch.testing.assert_close(recorded.grad, 2 * batch)
    every_other = state[:, :, ::2]
    first, *_ = Scatter.apply(slots, None, 1, every_other)
    assert first.untyped_storage().data_ptr() == state.untyped_storage().data_ptr(), "one device has no copy either"


# Errors and the shape of the graph


def test_sums_refuse_another_number_of_tensors(root: torch.device) -> None:
    with pytest.raises(ValueError, match="3 tensors cannot be 2 for each slot"):
        ReduceAddCoalesced.apply(root, 2, *(leaf(2, device=root) for _ in range(3)))


def test_gather_refuses_numbers_beside_vectors(root: torch.device) -> None:
    for shapes in ([(), (2,)], [(2,), ()]):
        with pytest.raises(ValueError, match=r"tensor 0 has shape .*, tensor 1 has"):
            Gather.apply(root, 0, *(leaf(*shape, device=root) for shape in shapes))


def test_the_gather_is_one_node_that_leads_to_every_output(slots: list, root: torch.device) -> None:
    outputs = [tensor * 2 for tensor in leaves(slots, 2)]
    gathered = Gather.apply(root, 0, *outputs)  # kept: its node says nothing without it
    assert [function for function, _ in gathered.grad_fn.next_functions if function] == [
        output.grad_fn for output in outputs
    ]


# Collect: one node brings tensors of several devices to one


def of_slots(slots: list) -> list[Tensor]:
    return [
        torch.randn(slot + 1, 2, dtype=torch.float64, device=device, requires_grad=True)
        for slot, device in enumerate(slots)
    ]


def test_collect_is_twice_differentiable(slots: list, root: torch.device) -> None:
    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(found**2 for found in Collect.apply([root], *inputs))

    assert_twice_differentiable(function, *of_slots(slots))


def test_what_is_collected_and_gets_no_gradient_has_none(slots: list, root: torch.device) -> None:
    sources = of_slots(slots)
    found = Collect.apply([root], *sources, torch.arange(3, device=root))
    assert not found[-1].requires_grad
    found[1].sum().backward()
    assert [source.grad is None for source in sources] == [True, False, True]
    assert sources[1].grad.device == sources[1].device


# Checkpoints


class Restoring(torch.autograd.Function):
    """Its backward appends the CPU generator's state to ``seen``, asks for it to be restored, and draws."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seen: list) -> Tensor:
        ctx.seen = seen
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.seen.append(torch.get_rng_state())
        restore_after_backward()
        torch.rand(3)
        return grad, None


def test_backward_leaves_the_cpu_generator_as_the_first_gather_found_it() -> None:
    source = torch.randn(2, requires_grad=True)
    for _ in range(2):
        seen: list[Tensor] = []
        output = Restoring.apply(Restoring.apply(source, seen), seen)
        torch.rand(5)
        output.sum().backward()
        assert len(seen) == 2
        assert not torch.equal(seen[0], seen[1])
        assert torch.equal(torch.get_rng_state(), seen[0])
