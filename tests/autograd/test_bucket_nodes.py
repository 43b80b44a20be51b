"""The nodes of a bucket: one edge carries all of its gradients, and they are the sums over the slots.

Hooks on the nodes may look. They may change gradients only where no envelope carries them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.autograd.bucket_gradients import GradientStreams, broadcast_bucket
from dataparallel.comm.streams.current import current_streams
from graphs import nodes_of

SHAPES = [(3,), (2, 4), (), (3,), (4, 2, 3, 3)]


@pytest.fixture
def sources(root: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator).to(root) for shape in SHAPES]
    tensors[-1] = tensors[-1].contiguous(memory_format=torch.channels_last)
    return [tensor.requires_grad_() for tensor in tensors]


def broadcast(slots: list, sources: list[Tensor]) -> list[tuple[Tensor, ...]]:
    devices = [torch.device(slot) for slot in slots]
    return broadcast_bucket(devices, sources, GradientStreams.for_forward(devices, current_streams(devices)))


def loss_of(copies: list[tuple[Tensor, ...]], root: torch.device, uses: Any = lambda slot, i: True) -> Tensor:
    """Each slot's gradient is its number, from 1 on, times the copy's position, from 1 on, times twice the copy."""
    losses = [
        (slot + 1) * (i + 1) * copy.square().sum().to(root)
        for slot, of_slot in enumerate(copies)
        for i, copy in enumerate(of_slot)
        if uses(slot, i)
    ]
    return sum(losses)  # type: ignore[return-value]


def expected(sources: list[Tensor], slots: list, uses: Any = lambda slot, i: True) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for i, source in enumerate(sources):
        weight = sum(slot + 1 for slot in range(len(slots)) if uses(slot, i))
        found.append(2 * (i + 1) * weight * source.detach() if weight else None)
    return found


def check(sources: list[Tensor], wanted: list[Tensor | None]) -> None:
    for source, gradient in zip(sources, wanted, strict=True):
        if gradient is None:
            assert source.grad is None
        else:
            torch.testing.assert_close(source.grad, gradient, rtol=1e-12, atol=0)


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


def test_a_source_with_repeats_has_a_whole_gradient(slots: list, root: torch.device, sources: list) -> None:
    repeated = torch.arange(3.0, dtype=torch.float64).to(root).expand(2, 3).requires_grad_()
    copies = broadcast(slots, [*sources, repeated])
    assert all(of_slot[-1].stride() == (0, 1) for of_slot in copies)
    factors = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    losses = [(of_slot[-1] * factors.to(of_slot[-1].device)).sum().to(root) for of_slot in copies]
    (gradient,) = torch.autograd.grad(sum(losses) + loss_of([of_slot[:-1] for of_slot in copies], root), [repeated])
    assert torch.equal(gradient.cpu(), factors * len(slots))


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
