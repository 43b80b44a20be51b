"""Gradients of a unit: sums over the slots in one order, gradients that wait, lost ones."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from at_once import in_threads
from dataparallel.composable import MixedPrecisionPolicy, fully_shard
from dataparallel.sharded.units.backward import PassGradients
from dataparallel.sharded.units.unit import Layout


class Scaled(nn.Module):
    """The gradients of its parameters are full of the sample and of twice the sample; of small ones, the first's only.

    The second parameter cannot be divided evenly.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(6, 2, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.least = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = (x[:, None, None] * self.first).sum((1, 2))
        return y + (2 * x[:, None] * self.second).sum(1) if x.abs().max() >= self.least else y


@pytest.fixture
def net(slots: list, root: torch.device) -> Any:
    return fully_shard(Scaled().to(root), devices=slots)


@pytest.fixture
def x(slots: list) -> Tensor:
    """A sample for each slot, which shows in sums whose it is. On the host, where it orders no streams."""
    return torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)


def assert_sums(net: Any, *expected: float | None) -> None:
    """Asserts that each gradient is full of this number, and divided as its parameter is."""
    for parameter, number in zip(net.parameters(), expected, strict=True):
        if number is None:
            assert parameter.grad is None
        else:
            found = parameter.grad.full_tensor("cpu")
            assert torch.equal(found, torch.full_like(found, number))
            assert (parameter.grad.devices, parameter.grad.dtype) == (parameter.devices, parameter.dtype)


def backward(net: Any, x: Tensor) -> None:
    net(x).sum().backward()


def wait(net: Any, x: Tensor) -> None:
    """Leaves the gradients on the slots."""
    with net.no_sync():
        backward(net, x)


class TestSums:
    def test_are_over_all_slots_and_added_to_the_gradients_that_are_there(self, net, x):
        """Those stay the same objects: other code may refer to them."""
        backward(net, x)
        assert_sums(net, 111, 222)
        before = [parameter.grad for parameter in net.parameters()]
        backward(net, x)
        assert_sums(net, 222, 444)
        assert all(p.grad is grad for p, grad in zip(net.parameters(), before, strict=True))

    def test_have_the_same_bits_in_every_run(self, net, slots, root):
        """In float32 1e8 + 1.0 is 1e8; in another order the sum is 1.0."""
        net = fully_shard(Scaled(torch.float32).to(root), devices=slots)
        for _ in range(10):
            backward(net, torch.tensor([1e8, 1.0, -1e8]))
        assert_sums(net, 0, 0)

    def test_of_16_bits_are_made_in_32(self, slots, root):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        net = fully_shard(Scaled(torch.float32).to(root), devices=slots, mp_policy=policy)
        net(torch.tensor([256.0, 1.0, 1.0])).float().sum().backward()  # in bfloat16 256 + 1 is 256
        assert_sums(net, 258, 516)


ZEROING = {
    "zero_": lambda grad: grad.zero_(),
    "fill_": lambda grad: grad.fill_(0),
    "copy_": lambda grad: grad.copy_(torch.zeros_like(grad)),
    "zeros on lists": lambda grad: torch._foreach_zero_([grad]),
    "copies on lists": lambda grad: torch._foreach_copy_([grad], [torch.zeros_like(grad)]),
}


class TestGradientsThatWait:
    def test_stay_on_the_slots_until_a_backward_that_adds_up(self, net, x):
        wait(net, x)
        assert_sums(net, 0, 0)  # they say that some wait
        backward(net, x[:1])
        assert_sums(net, 112, 224)

    def test_are_dropped_with_the_gradients_they_belong_to(self, net, x):
        wait(net, x)
        net.first.grad = None
        backward(net, x)
        assert_sums(net, 111, 444)

    @pytest.mark.parametrize("zero", ZEROING.values(), ids=ZEROING)
    def test_are_dropped_however_these_are_zeroed(self, net, x, zero):
        backward(net, x)
        wait(net, x)
        with torch.no_grad():
            zero(net.first.grad)
        backward(net, x)
        assert_sums(net, 111, 3 * 222)

    @pytest.mark.parametrize("write", [lambda grad: grad.mul_(2), lambda grad: grad.sub_(grad).add_(222)])
    def test_stay_where_these_are_written_to(self, net, x, write):
        backward(net, x)
        wait(net, x)
        with torch.no_grad():
            write(net.first.grad)
        backward(net, x)
        assert_sums(net, 222 + 222, 3 * 222)

    @pytest.mark.devices("cpu")  # there a backward runs in the thread that has called it
    def test_are_added_where_two_threads_bring_them(self, net, x, monkeypatch):
        copy_in, both = Layout.copy_in, threading.Barrier(2)

        def at_once(self: Layout, *args: Any) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # if both threads can be here, they are
            copy_in(self, *args)

        with net.no_sync():
            losses = [net(x).sum() for _ in range(2)]
            monkeypatch.setattr(Layout, "copy_in", at_once)
            in_threads(2, lambda index, barrier: losses[index].backward())
        monkeypatch.undo()
        backward(net, x)
        assert_sums(net, 333, 666)


@pytest.mark.devices("cpu")  # there a backward runs in the thread that has called it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_backward_that_has_lost_gradients_to_one_that_failed_raises(slots: list) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (model[1], model):
        fully_shard(module, devices=slots)
    x = torch.ones(3, 4, requires_grad=True)
    x.register_hook(lambda grad: {}["fails"])
    other, threads = model(x).sum(), []

    def fail_elsewhere(grad: Tensor) -> None:
        if not threads:
            threads.append(threading.Thread(target=other.backward))
            threads[0].start()
            threads[0].join(60)

    handle = model[0].register_forward_hook(lambda module, args, y: y.register_hook(fail_elsewhere) and None)
    loss = model(torch.ones(3, 4)).sum()
    handle.remove()
    with pytest.raises(RuntimeError, match="lost gradients: it ran together with another one"):
        loss.backward()
    model.zero_grad()
    model(torch.ones(3, 4)).sum().backward()


def test_a_backward_that_shares_units_with_a_pass_that_failed_is_refused() -> None:
    shared = PassGradients()
    shared.begin_pass()
    shared.begin_pass()
    shared.fail_pass()
    with pytest.raises(RuntimeError, match="shares modules with another one"):
        shared.end_pass()


def test_a_graph_whose_parameters_are_gone_says_so(net, x):
    loss = net(x).sum()
    net.second.requires_grad_(False)
    net(x)
    with pytest.raises(RuntimeError, match=r"parameters that this graph uses are gone.*Call backward\(\) before"):
        loss.backward()
