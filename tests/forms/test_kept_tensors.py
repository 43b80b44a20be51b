"""Tensors of kept replicas are outputs of one kept broadcast, and have the source's values at every forward.

Their buckets, and the sums, are in the order in which gradients arrived in the first pass.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kept import Branched, gradients, loss, numbers, settled, tensors_of, with_kept_replicas
from loops import assert_same_loop, mean_square, waits
from torch import Tensor, nn

from at_once import in_threads
from dataparallel import DataParallel
from dataparallel.autograd.bucket_gradients import OnSlot, ToSlots
from dataparallel.gradients.gradient_sums import GradientSums, SourceBucket
from dataparallel.testing.cases import seeded

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture
def x(slots: list, root: torch.device) -> Tensor:
    return numbers(root, 2 * len(slots) + 1)


def copies_of(wrapped: DataParallel) -> list[list[Tensor]]:
    return tensors_of(wrapped).copies.by_slot


@pytest.mark.parametrize("of", ["parameters", "input"])
def test_a_graph_whose_values_are_gone_raises_as_on_one_device(net: Branched, slots: list, x: Tensor, of: str) -> None:
    """The second forward writes other values to the memory that the first one's backward would read."""
    wrapped = settled(net, slots, x)
    leaf = x.clone().requires_grad_()
    value = loss(wrapped(leaf))
    with torch.no_grad():
        net.second.weight.mul_(2)
    wrapped(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, [leaf] if of == "input" else list(net.parameters()))
    assert gradients(net) == [None] * len(gradients(net))


@pytest.mark.slots(2)
def test_replicas_on_other_slots_notice_too(net: Branched, slots: list, x: Tensor) -> None:
    """Slot 0 shares the versions of the source; here only the last slot's backward runs."""
    wrapped = settled(net, slots, x)
    leaf = x.clone().requires_grad_()
    output = wrapped(leaf)
    with torch.no_grad():
        net.second.weight.mul_(2)
    wrapped(x)
    kept = copies_of(wrapped)[1]
    assert all(tensor._version > 0 for tensor in kept if tensor.shape == (8, 8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output[-1].sum().backward()


def test_buffers_are_slot_0s(slots: list, root: torch.device) -> None:
    net = nn.BatchNorm1d(4, momentum=0.5).double().to(root)
    wrapped = with_kept_replicas(net, slots)
    for step in range(3):
        wrapped(numbers(root, 4 * len(slots), seed=step))
    first = copies_of(wrapped)[0]
    assert any(tensor is net.running_mean for tensor in first)
    seen = []

    def look(module: nn.Module, args: tuple) -> None:
        seen.append(module.running_mean.cpu().clone())

    net.register_forward_pre_hook(look)
    wrapped(numbers(root, 4 * len(slots)))
    assert len(seen) == len(slots)
    assert all(torch.equal(each, seen[0]) for each in seen)


def test_several_threads_may_call(net: Branched, twin: Branched, slots: list, x: Tensor) -> None:
    wrapped = settled(net, slots, x)
    expected = twin(x).detach()

    def call(*_: object) -> None:
        for _ in range(10):
            torch.testing.assert_close(wrapped(x).detach(), expected, rtol=0, atol=1e-9)

    in_threads(3, call)


@pytest.mark.devices("sim", "cuda")  # slots on the CPU share the source's memory
def test_a_thread_writes_to_no_copies_of_another(net: Branched, slots: list, x: Tensor) -> None:
    def addresses() -> set[int]:
        return {tensor.data_ptr() for tensor in copies_of(wrapped)[-1] if tensor.numel()}

    wrapped = settled(net, slots, x)
    graph, held, mine = wrapped(x), copies_of(wrapped), addresses()
    with ThreadPoolExecutor(1) as other:
        other.submit(wrapped, x).result()
    assert mine.isdisjoint(addresses())
    loss(graph).backward()
    del held
    wrapped(x)
    mine = addresses()
    wrapped(x)
    assert addresses() == mine, "a thread that is alone again uses its copies again"


def test_buckets_follow_the_order_in_which_gradients_came(net: Branched, slots: list, x: Tensor) -> None:
    class Reversed(Branched):
        """The layer that is registered last is used first."""

        def forward(self, x: Tensor) -> Tensor:
            return self.first(torch.tanh(self.second(torch.tanh(nn.functional.pad(self.branch(x), (0, 6))))))[:, :2]

    net.__class__ = Reversed
    net.first, net.second = nn.Linear(8, 8).to(net.last.weight), nn.Linear(8, 8).to(net.last.weight)
    wrapped = settled(net, slots, x)
    made = tensors_of(wrapped).copies
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    order = [names[id(made.plan.tensors[i])].split(".")[0] for group in made.buckets for i in group]
    assert list(dict.fromkeys(order)) == ["first", "second", "branch", "last"]
    assert len(made.buckets) > 2


def test_sums_are_launched_in_the_order_of_buckets(
    slots: list, root: torch.device, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which gradients arrive may change from step to step, and some layers may not be used."""

    class EitherWay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

        def forward(self, x: Tensor, order: list[int]) -> Tensor:
            for k in order:
                x = torch.tanh(self.layers[k](x))
            return x

    net = EitherWay().double().to(root)
    wrapped = with_kept_replicas(net, slots)
    for _ in range(2):
        loss(wrapped(x, [0, 1, 2, 3, 4])).backward()
    take = GradientSums.take
    copies = tensors_of(wrapped).copies
    assert len(copies.buckets) > 3
    numbers = {id(copies.plan.tensors[group[0]]): number for number, group in enumerate(copies.buckets)}
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4], [3, 1]):
        launched: list[int] = []

        def noted(sums: GradientSums, bucket: SourceBucket, *arguments, launched=launched, numbers=numbers):
            launched.append(numbers[id(bucket.sources[0])])
            return take(sums, bucket, *arguments)

        monkeypatch.setattr(GradientSums, "take", noted)
        loss(wrapped(x, order)).backward()
        assert launched == sorted(launched)
        assert len(launched) >= len(order) - 1


@pytest.mark.devices("sim", "cuda")
def test_a_root_that_comes_late_does_not_change_the_order_that_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread takes ready buckets in any order. Here all are ready before it takes the second one."""
    layers = 12
    root, other = torch.device(0), torch.device(1)
    left = {root: 2 * layers, other: 2 * layers}
    done = {device: threading.Event() for device in left}
    backward, brought = OnSlot.backward, ToSlots.take_gradients

    def noted(ctx, *grads):
        if ctx.device == other:
            assert done[root].wait(20)
        found = backward(ctx, *grads)
        left[ctx.device] -= 1
        if left[ctx.device] == 0:
            done[ctx.device].set()
        return found

    def late(*arguments):
        assert done[other].wait(20)
        return brought(*arguments)

    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).double().to(root)
    wrapped = with_kept_replicas(net, [root, other])
    with monkeypatch.context() as patch:
        patch.setattr(OnSlot, "backward", noted)
        patch.setattr(ToSlots, "take_gradients", late)
        loss(wrapped(numbers(root, 4))).backward()
    loss(wrapped(numbers(root, 4))).backward()
    order = [i // 2 for group in tensors_of(wrapped).copies.buckets for i in group]
    assert order == sorted(order, reverse=True)


class Sparse(nn.Module):
    """Has a weight in COO layout, and the same layout in a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).relu().to_sparse())
        self.frozen = nn.Parameter(torch.randn(4, 4).relu().to_sparse(), requires_grad=False)
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.seen: list[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        tensors = [self.weight, self.frozen, self.graph]
        self.seen.append([tensor.detach().cpu().to_dense() for tensor in tensors])
        y = torch.sparse.mm(self.graph, torch.sparse.mm(self.frozen, x.t()))
        return torch.sparse.mm(self.weight, y).t()


def scaled(tensor: Tensor, step: int) -> None:
    tensor.mul_(2)


def with_another_pattern(tensor: Tensor, step: int) -> None:
    other = torch.zeros(4, 4, dtype=tensor.dtype)
    other[0, step] = other[2, : step + 1] = 7
    tensor.copy_(other.to_sparse().to(tensor.device))


@pytest.mark.parametrize("name", ["weight", "frozen", "graph"])
@pytest.mark.parametrize("change", [scaled, with_another_pattern])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_a_change_in_place_reaches_all_replicas(
    slots: list, root: torch.device, change: Callable, name: str, context: Callable
) -> None:
    net = seeded(Sparse)().to(root)
    wrapped = with_kept_replicas(net, slots)
    x = torch.ones(len(slots), 4, dtype=torch.float64, device=root)
    for step in range(4):
        with torch.no_grad():
            change(getattr(net, name), step)
        expected = [tensor.detach().cpu().to_dense() for tensor in (net.weight, net.frozen, net.graph)]
        net.seen.clear()
        with context():
            output = wrapped(x)
        assert len(net.seen) == len(slots)
        for seen in net.seen:
            assert all(map(torch.equal, seen, expected))
        if output.requires_grad:
            output.sum().backward()


def test_training_is_that_of_one_device(slots: list, root: torch.device) -> None:
    def loop(net: Sparse) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(6):
            x = torch.randn(2 * len(slots) + 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            with waits(net) if step % 2 == 0 else torch.enable_grad():
                mean_square(net(x.to(root))).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    net.graph.mul_(1.1)

    assert_same_loop(loop, slots, seeded(Sparse))
