"""Buckets of persistent replicas, and their sums, are in the order in which gradients arrived in the first pass."""

import threading

import pytest
import torch
from persistent import Branched, loss, numbers, settled, tensors_of, with_persistent_replicas
from torch import Tensor, nn

from dataparallel.autograd.bucket_nodes import OnSlot, ToSlots
from dataparallel.gradients.gradient_sums import GradientSums, SourceBucket

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


@pytest.fixture
def x(slots: list, root: torch.device) -> Tensor:
    return numbers(root, 2 * len(slots) + 1)


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
    wrapped = with_persistent_replicas(net, slots)
    for _ in range(2):
        loss(wrapped(x, [0, 1, 2, 3, 4])).backward()
    take = GradientSums.take
    copies = tensors_of(wrapped).copies
    assert len(copies.buckets) > 3
    numbers = {id(copies.plan.tensors[group[0]]): number for number, group in enumerate(copies.buckets)}
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4], [3, 1]):
        launched: list[int] = []

        def noted(sums: GradientSums, bucket: SourceBucket, *arguments, launched=launched):
            launched.append(numbers[id(bucket.sources[0])])
            return take(sums, bucket, *arguments)

        monkeypatch.setattr(GradientSums, "take", noted)
        loss(wrapped(x, order)).backward()
        assert launched == sorted(launched)
        assert len(launched) >= len(order) - 1


@pytest.mark.devices("sim", "cuda")
@pytest.mark.usefixtures("one_intra_op_thread")
def test_a_root_that_comes_late_does_not_change_the_order_that_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread takes ready buckets in any order. Here all are ready before it takes the second one."""
    layers = 12
    root, other = torch.device(0), torch.device(1)
    left = {root: 2 * layers, other: 2 * layers}
    done = {device: threading.Event() for device in left}
    backward, brought = OnSlot.backward, ToSlots.brought

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
    wrapped = with_persistent_replicas(net, [root, other])
    with monkeypatch.context() as patch:
        patch.setattr(OnSlot, "backward", noted)
        patch.setattr(ToSlots, "brought", late)
        loss(wrapped(numbers(root, 4))).backward()
    loss(wrapped(numbers(root, 4))).backward()
    order = [i // 2 for group in tensors_of(wrapped).copies.buckets for i in group]
    assert order == sorted(order, reverse=True)
