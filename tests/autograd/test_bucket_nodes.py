"""The nodes of a bucket: one edge carries all of its gradients, and each slot's device flattens its own."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.autograd.bucket_gradients import Packing, SlotGradients, contents_of
from dataparallel.autograd.bucket_nodes import FromSource, OnSlot, ToSlots, broadcast_bucket
from dataparallel.comm import using
from dataparallel.comm.cupy.transport import Kernels
from dataparallel.streams.current import current_streams
from dataparallel.streams.gradients import GradientStreams
from graphs import nodes_of

SHAPES = [(3,), (2, 4), (), (3,), (4, 2, 3, 3)]


@pytest.fixture
def sources(root: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator).to(root) for shape in SHAPES]
    tensors[-1] = tensors[-1].contiguous(memory_format=torch.channels_last)
    return [tensor.requires_grad_() for tensor in tensors]


def broadcast(slots: list, sources: list[Tensor], **arguments: Any) -> list[tuple[Tensor, ...]]:
    devices = [torch.device(slot) for slot in slots]
    return broadcast_bucket(
        devices, sources, GradientStreams.for_forward(devices, current_streams(devices)), **arguments
    )


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


@pytest.mark.slots(2, 3)
@pytest.mark.parametrize("route", ["star", "tree", "chain"])
def test_the_route_is_that_of_the_forward(slots: list, root: torch.device, sources: list, route: str) -> None:
    with using(route=route):
        loss = loss_of(broadcast(slots, sources), root)
    loss.backward()
    check(sources, expected(sources, slots))


@pytest.mark.devices("sim", "cuda")
class TestOnAccelerators:
    """The threads and streams of each step."""

    @pytest.fixture(autouse=True)
    def distinct(self, slots: list) -> None:
        if len({*slots}) < len(slots):
            pytest.skip("nothing travels between slots on one device")

    def test_each_device_flattens_in_its_own_thread(
        self, slots: list, root: torch.device, sources: list, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: dict[torch.device, int] = {}
        init = SlotGradients.__init__

        def noted(self: SlotGradients, grads: Any, bucket: Any = None) -> None:
            init(self, grads, bucket)
            assert self.flat is not None
            assert not self.others
            threads[self.flat.device] = threading.get_ident()

        monkeypatch.setattr(SlotGradients, "__init__", noted)
        loss_of(broadcast(slots, sources), root).backward()
        assert {*threads} == {torch.device(slot) for slot in slots}
        assert len({*threads.values()}) == len(slots)

    def test_nothing_is_flattened_if_the_caller_says_so(
        self, slots: list, root: torch.device, sources: list, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        summed = []
        whole = ToSlots.summed
        monkeypatch.setattr(ToSlots, "summed", lambda ctx, brought: summed.extend(brought) or whole(ctx, brought))
        loss_of(broadcast(slots, sources, may_flatten=lambda: False), root).backward()
        assert [of_slot.flat for of_slot in summed] == [None] * len(slots)
        check(sources, expected(sources, slots))

    def test_what_comes_from_the_source_belongs_to_the_callers_stream(self, slots: list, root: torch.device) -> None:
        x = torch.ones(3, device=root, requires_grad=True)
        seen: list[torch.Stream] = []
        (copy, *_) = (of_slot[0] for of_slot in broadcast(slots, [x]))
        from_source = copy.grad_fn.next_functions[0][0].next_functions[0][0]
        assert from_source.name() == "FromSourceBackward"
        from_source.register_prehook(lambda _: seen.append(torch.accelerator.current_stream(root)))
        (copy * 2).sum().backward()
        assert seen == [torch.accelerator.current_stream(root)]
        assert x.grad.tolist() == [2, 2, 2]

    def test_an_envelope_has_no_memory_and_gives_its_contents_away(self, root: torch.device) -> None:
        seen: list[Tensor] = []

        class Sums(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, handle: Tensor) -> Tensor:
                ctx.source = root
                return torch.zeros((), device=root)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
                grads = [torch.full((3, 2), 5.0, device=root), None]
                seen.append(ToSlots.handed_on(ctx, grads))
                return seen[0]

        x = torch.ones(3, 2, device=root, requires_grad=True)
        y = torch.ones((), dtype=torch.float64, device=root, requires_grad=True)
        Sums.apply(FromSource.apply(x, y)).backward()
        assert x.grad.tolist() == [[5, 5]] * 3
        assert y.grad is None
        assert [each.untyped_storage().nbytes() for each in seen] == [0]
        assert "contents" not in vars(seen[0])


def test_gradients_that_kernels_read_in_place_stay_there(make_slots: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [torch.device(slot) for slot in make_slots(2)]
    tensors = [torch.ones(3, device=slots[0])]
    travels = len({*slots}) > 1 or comm.are_slots_isolated()
    assert comm.sums_travel_flat(slots, tensors) == travels
    monkeypatch.setattr(comm, "transport_for", lambda *arguments: Kernels())
    assert not comm.sums_travel_flat(slots, tensors)


def test_a_bucket_is_planned_once_for_the_same_gradients(make_slots: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [torch.device(slot) for slot in make_slots(2)]
    tensors = [torch.ones(3, device=slots[0]), torch.ones(2, device=slots[0])]
    monkeypatch.setattr(comm, "sums_travel_flat", lambda slots, tensors: True)
    packing = Packing(slots, tensors, None)
    with torch.no_grad():
        whole, part = packing.bucket_of(tensors), packing.bucket_of([tensors[0], None])
        assert whole is packing.bucket_of([*tensors])
        assert part is packing.bucket_of([tensors[1].new_ones(3), None])
        assert sorted(whole.indices) == [0, 1]
        assert part.indices == [0]
        assert packing.bucket_of([None, None]) is None
    assert packing.bucket_of(tensors) is None, "while gradients are recorded"


def test_gradients_are_taken_out_of_a_flat_buffer(make_slots: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "sums_travel_flat", lambda slots, tensors: True)
    root = torch.device(make_slots(2)[0])
    grads = [torch.arange(3.0, device=root), None, torch.ones(2, 2, device=root)]
    packing = Packing([root], [grads[0], torch.ones(1, device=root), grads[2]], None)
    with torch.no_grad():
        brought = SlotGradients(grads, packing.bucket_of(grads))
    assert brought.flat is not None
    assert brought.flat.numel() == 7
    first, second, third = brought.as_list()
    assert torch.equal(first, grads[0])
    assert second is None
    assert torch.equal(third, grads[2])


def test_no_gradient_at_all(slots: list, root: torch.device, sources: list) -> None:
    """The engine runs the nodes without any gradient."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    copies = broadcast(slots, sources)
    sum(Nothing.apply(copy).to(root) for of_slot in copies for copy in of_slot).backward()
    assert all(source.grad is None for source in sources)
    assert contents_of(None) is None
    assert OnSlot.__name__ in copies[0][0].grad_fn.name()


# Hooks of the user on these nodes


def node_of(copies: list[tuple[Tensor, ...]], name: str) -> Any:
    """The first slot's `OnSlot`, `ToSlots` or `FromSource`."""
    node = copies[0][0].grad_fn
    while node.name() != f"{name}Backward":
        node = node.next_functions[0][0]
    return node


NAMES = ["OnSlot", "ToSlots", "FromSource"]


@pytest.mark.parametrize("name", NAMES)
def test_hooks_may_look(name: str, slots: list, root: torch.device, sources: list) -> None:
    seen = []
    copies = broadcast(slots, sources)
    node_of(copies, name).register_prehook(seen.append)
    node_of(copies, name).register_hook(lambda inputs, outputs: seen.append(inputs))
    loss_of(copies, root).backward()
    assert len(seen) == 2
    check(sources, expected(sources, slots))


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
@pytest.mark.parametrize("name", NAMES[1:])
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


def test_a_hook_on_what_a_slot_brings_is_refused_too(slots: list, root: torch.device, sources: list) -> None:
    copies = broadcast(slots, sources)
    node_of(copies, "OnSlot").register_hook(lambda inputs, outputs: (inputs[0] * 2, *inputs[1:]))
    with pytest.raises(RuntimeError, match="between OnSlotBackward, ToSlotsBackward and FromSourceBackward"):
        loss_of(copies, root).backward()


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


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_hook_may_say_that_there_is_no_gradient(name: str, slots: list, root: torch.device, sources: list) -> None:
    copies = broadcast(slots, sources)
    node_of(copies, name).register_prehook(lambda grads: (None, *grads[1:]))
    loss_of(copies, root).backward()
    check(sources, expected(sources, slots, lambda slot, i: slot > 0 and name == "ToSlots"))


@pytest.mark.devices("sim")
def test_what_a_hook_drops_is_not_used_again_before_the_root_has_waited(slots: list, root: torch.device) -> None:
    """Sums are written on side streams, but their memory belongs to the caller's stream."""
    devices = [torch.device(slot) for slot in slots]
    gradient_streams = GradientStreams.for_forward(devices, current_streams(devices))
    losses: list[Tensor] = []

    def drop(grads: tuple[Tensor, ...]) -> tuple[None, ...]:
        torch.ones(16, device=root)  # could get the memory that the hook before this one has dropped
        return (None,)

    for _ in range(4):
        copies = broadcast_bucket(devices, [torch.ones(16, device=root, requires_grad=True)], gradient_streams)
        node_of(copies, "FromSource").register_prehook(drop)
        losses.append(loss_of(copies, root))
    sum(losses).backward()


def test_no_two_gradients_meet_between_the_nodes(slots: list, root: torch.device, sources: list) -> None:
    """Autograd would add the envelopes, and lose their contents. So each output of these nodes has one user."""
    loss = sum(loss_of(broadcast(slots, sources), root) for _ in range(2))
    edges = [edge for node in nodes_of(loss) for edge in node.next_functions if edge[0] is not None]
    edges = [edge for edge in edges if edge[0].name() in ("ToSlotsBackward", "FromSourceBackward")]
    assert len(edges) == len({*edges}) == 2 * (len(slots) + 1)
