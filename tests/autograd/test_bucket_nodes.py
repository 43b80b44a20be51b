"""The nodes of a bucket: one edge carries all of its gradients, and they are the sums over the slots.

Hooks on the nodes may look. They may change gradients only where no envelope carries them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from buckets import broadcast, check, expected, loss_of
from dataparallel.autograd.bucket_gradients import Packing, SlotGradients
from graphs import nodes_of


def numbers_of_nodes(output: Tensor) -> dict[str, int]:
    """How many nodes of each kind a graph has."""
    names = [node.name() for node in nodes_of(output)]
    return {name: names.count(name) for name in ("FromSourceBackward", "ToSlotsBackward", "OnSlotBackward")}


def test_copies_are_the_sources_and_gradients_their_sums(slots: list, root: torch.device, sources: list) -> None:
    copies = broadcast(slots, sources)
    for slot, of_slot in zip(slots, copies, strict=True):
        assert [copy.device for copy in of_slot] == [torch.device(slot)] * len(sources)
        assert [copy.stride() for copy in of_slot] == [source.stride() for source in sources]
        assert all(torch.equal(copy.to(root), source) for copy, source in zip(of_slot, sources, strict=True))
    loss = loss_of(copies, root)
    assert numbers_of_nodes(loss) == {"FromSourceBackward": 1, "ToSlotsBackward": 1, "OnSlotBackward": len(slots)}
    loss.backward()
    check(sources, expected(sources, slots))
    assert sources[-1].grad.stride() == sources[-1].stride()


@pytest.mark.parametrize(
    "uses",
    [
        lambda slot, i: i != 1,  # unused by all
        lambda slot, i: not (slot == 0 and i == 2),  # by the first slot
        lambda slot, i: slot > 0,  # the first slot uses none
        lambda slot, i: slot == 1 or i == 0,
        lambda slot, i: slot == i,
        lambda slot, i: slot == 0 and i == 3,
    ],
)
def test_gradients_are_none_where_no_slot_has_one(slots: list, root: torch.device, sources: list, uses: Any) -> None:
    for _ in range(2):
        for source in sources:
            source.grad = None
        loss_of(broadcast(slots, sources), root, uses).backward()
        check(sources, expected(sources, slots, uses))


def test_a_source_with_repeats_has_a_whole_gradient(slots: list, root: torch.device, sources: list) -> None:
    repeated = torch.arange(3.0, dtype=torch.float64).to(root).expand(2, 3).requires_grad_()
    copies = broadcast(slots, [*sources, repeated])
    assert all(of_slot[-1].stride() == (0, 1) for of_slot in copies)
    factors = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    losses = [(of_slot[-1] * factors.to(of_slot[-1].device)).sum().to(root) for of_slot in copies]
    (gradient,) = torch.autograd.grad(sum(losses) + loss_of([of_slot[:-1] for of_slot in copies], root), [repeated])
    assert torch.equal(gradient.cpu(), factors * len(slots))


def test_a_graph_can_be_gone_through_again(slots: list, root: torch.device, sources: list) -> None:
    loss = loss_of(broadcast(slots, sources), root)
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        check(sources, [times * gradient for gradient in expected(sources, slots)])


def test_gradients_of_some_sources_alone(slots: list, root: torch.device, sources: list) -> None:
    loss = loss_of(broadcast(slots, sources), root)
    (gradient,) = torch.autograd.grad(loss, [sources[3]])
    torch.testing.assert_close(gradient, expected(sources, slots)[3], rtol=1e-12, atol=0)
    assert all(source.grad is None for source in sources)


def test_gradients_of_gradients(slots: list, root: torch.device, sources: list) -> None:
    grads = torch.autograd.grad(loss_of(broadcast(slots, sources), root), sources, create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    for source, first in zip(sources, expected(sources, slots), strict=True):
        factor = (first / source.detach()).mean()
        torch.testing.assert_close(source.grad, 2 * factor * first, rtol=1e-12, atol=0)


def test_sparse_gradients_travel_beside_flat_ones(slots: list, root: torch.device, sources: list) -> None:
    table = torch.randn(5, 2, dtype=torch.float64).to(root).requires_grad_()
    for _ in range(2):
        copies = broadcast(slots, [*sources, table])
        loss: Any = loss_of([of_slot[:-1] for of_slot in copies], root)
        for k, of_slot in enumerate(copies):
            rows = torch.nn.functional.embedding(torch.tensor([k, 1]).to(of_slot[-1].device), of_slot[-1], sparse=True)
            loss = loss + rows.sum().to(root)
        loss.backward()
    check(sources, [2 * gradient for gradient in expected(sources, slots)])
    assert table.grad.is_sparse
    rows = torch.zeros(5, dtype=torch.float64)
    for k in range(len(slots)):
        rows[k] += 2
        rows[1] += 2
    assert torch.equal(table.grad.to_dense().cpu(), rows[:, None].expand(5, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_other_dtypes(slots: list, root: torch.device, dtype: torch.dtype) -> None:
    sources = [torch.full((k,), k, dtype=dtype, device=root, requires_grad=True) for k in (1, 2, 3)]
    copies = broadcast(slots, sources)
    torch.autograd.backward(
        [copy for of_slot in copies for copy in of_slot],
        [torch.full_like(copy, slot + 1) for slot, of_slot in enumerate(copies) for copy in of_slot],
    )
    total = sum(range(1, len(slots) + 1))
    for source in sources:
        assert source.grad.dtype == dtype
        assert torch.equal(source.grad, torch.full_like(source, total))


def test_anomaly_detection_finds_none_in_envelopes(slots: list, root: torch.device, sources: list) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        loss_of(broadcast(slots, sources), root).backward()
    check(sources, expected(sources, slots))


def test_gradients_are_taken_out_of_a_flat_buffer(make_slots: Any) -> None:
    root = torch.device(make_slots(2)[0])
    grads = [torch.arange(3.0, device=root), None, torch.ones(2, 2, device=root)]
    packing = Packing([root, torch.device("meta")], [grads[0], torch.ones(1, device=root), grads[2]], None)
    with torch.no_grad():
        brought = SlotGradients(grads, packing.bucket_of(grads))
    assert brought.flat is not None
    assert brought.flat.numel() == 7
    first, second, third = brought.as_list()
    assert torch.equal(first, grads[0])
    assert second is None
    assert torch.equal(third, grads[2])


def test_no_two_gradients_meet_between_the_nodes(slots: list, root: torch.device, sources: list) -> None:
    """Autograd would add the envelopes, and lose their contents. So each output of these nodes has one user."""
    loss = sum(loss_of(broadcast(slots, sources), root) for _ in range(2))
    edges = [edge for node in nodes_of(loss) for edge in node.next_functions if edge[0] is not None]
    edges = [edge for edge in edges if edge[0].name() in ("ToSlotsBackward", "FromSourceBackward")]
    assert len(edges) == len({*edges}) == 2 * (len(slots) + 1)


def node_of(copies: list[tuple[Tensor, ...]], name: str) -> Any:
    """The first slot's `OnSlot`, `ToSlots` or `FromSource`."""
    node = copies[0][0].grad_fn
    while node.name() != f"{name}Backward":
        node = node.next_functions[0][0]
    return node


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad * 1,
        torch.zeros_like,
        lambda grad: grad.mul_(2),
        lambda grad: grad.detach(),
        lambda grad: grad.as_subclass(torch.nn.Buffer),
    ],
    ids=["times", "fresh", "in place", "detached", "subclass"],
)
@pytest.mark.parametrize("name", ["ToSlots", "FromSource"])
def test_hooks_that_would_change_gradients_of_many_parameters_are_refused(
    name: str, change: Any, slots: list, root: torch.device, sources: list
) -> None:
    def hook(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else change(grad) for grad in grads)

    copies = broadcast(slots, sources)
    node_of(copies, name).register_prehook(hook)
    with pytest.raises(RuntimeError, match=r"a hook has changed a gradient .*Use Tensor\.register_hook"):
        loss_of(copies, root).backward()
    assert all(source.grad is None for source in sources)


def test_where_gradients_are_themselves_hooks_change_them(slots: list, root: torch.device, sources: list) -> None:
    """Hooks that the error recommends, and a pre-hook on the slot's node."""
    copies = broadcast(slots, sources)
    copies[0][0].register_hook(lambda grad: grad * 2)  # the first slot's: it counts as two of it
    sources[1].register_hook(lambda grad: grad * 3)
    node_of(copies, "OnSlot").register_prehook(lambda grads: (*grads[:2], None, *grads[3:]))
    loss_of(copies, root).backward()
    wanted = expected(sources, slots)
    total = sum(range(1, len(slots) + 1))
    check(sources, [wanted[0] * (total + 1) / total, wanted[1] * 3, wanted[2] * (total - 1) / total, *wanted[3:]])


@pytest.mark.parametrize("name", ["ToSlots", "FromSource"])
def test_a_hook_may_say_that_there_is_no_gradient(name: str, slots: list, root: torch.device, sources: list) -> None:
    copies = broadcast(slots, sources)
    node_of(copies, name).register_prehook(lambda grads: (None, *grads[1:]))
    loss_of(copies, root).backward()
    check(sources, expected(sources, slots, lambda slot, i: slot > 0 and name == "ToSlots"))
