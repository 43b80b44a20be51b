"""Tensors that later calls without a graph use again have the source's values, and nobody else holds them.

The tests look through the wrapper's forward. On slots of one device parameters share the source's memory, and the
promises hold trivially; distinct devices (``--devices=sim``) show them.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from nets import DOES, Net, on_one_device

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


@pytest.fixture
def same_as_one_device(wrapped, net, call, x) -> Callable[[], None]:
    def same_as_one_device() -> None:
        torch.testing.assert_close(call(), on_one_device(net, x))

    return same_as_one_device


def in_no_grad(change: Callable[[Net], Any]) -> Callable[[Net], Any]:
    return torch.no_grad()(change)


def swap(net: Net) -> None:
    net.linear.weight = nn.Parameter(net.linear.weight.detach() * 3)


def load(net: Net) -> None:
    net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})


CHANGES = {
    "copy_": in_no_grad(lambda net: net.linear.weight.copy_(torch.ones(4, 4))),
    "mul_ of all": in_no_grad(lambda net: [p.mul_(2) for p in net.parameters()]),
    "data.fill_": lambda net: net.linear.weight.data.fill_(0.25),
    "data =": lambda net: setattr(net.linear.weight, "data", net.linear.weight.data * 2),
    "data = other strides": lambda net: setattr(net.linear.weight, "data", net.linear.weight.data.t()),
    "load_state_dict": load,
    "load_state_dict, assign": lambda net: net.load_state_dict(
        {name: value * 2 for name, value in net.state_dict().items()}, assign=True
    ),
    "swapped parameter": swap,
    "a buffer in place": lambda net: net.shift.add_(1),
    "another buffer": lambda net: setattr(net, "shift", net.shift * 2),
    "requires_grad_": lambda net: net.requires_grad_(False),
    "a tie": lambda net: setattr(net.linear, "weight", net.fixed),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_seen_at_the_next_forward(change, net, same_as_one_device) -> None:
    same_as_one_device()
    same_as_one_device()
    for _ in range(2):
        change(net)
        same_as_one_device()
        same_as_one_device()


def test_a_view_of_data_taken_before_and_written_after(net, same_as_one_device) -> None:
    view = net.linear.weight.data[1:3]
    version = net.linear.weight._version
    same_as_one_device()
    same_as_one_device()
    view.fill_(7)
    assert net.linear.weight._version == version
    same_as_one_device()


def test_requires_grad_is_that_of_the_source(net, call) -> None:
    seen = []
    DOES.append(lambda replica: seen.append(replica.linear.weight.requires_grad))
    call()
    net.requires_grad_(False)
    call()
    net.requires_grad_(True)
    call()
    assert seen == [True] * 3 + [False] * 3 + [True] * 3


@pytest.mark.devices("sim", "cuda")
@pytest.mark.reuses("memory is used again")
def test_memory_and_tensors_are_used_again(call, net, slots) -> None:
    found: list[list[tuple[int, int]]] = [[], []]
    others: list[Tensor] = []
    for seen in found:
        DOES[:] = [lambda replica, seen=seen: seen.append((replica.fixed.data_ptr(), id(replica.fixed)))]
        call()
        net.linear.weight.data.add_(1)
        # They take the places of whatever the call has freed: equal addresses mean the same memory.
        others.extend(torch.empty(n, device=slot) for slot in slots for n in range(1, 200))
    elsewhere = [{*seen} for seen in found]
    assert len(elsewhere[0] & elsewhere[1]) >= sum(bool(torch.device(slot).index) for slot in slots)


def test_tensors_are_normal_ones_in_every_mode(wrapped, x) -> None:
    seen = []
    DOES.append(lambda replica: seen.extend(t.is_inference() for t in replica.state_dict(keep_vars=True).values()))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            wrapped(x)
    assert seen == [False] * 9 * len(wrapped.module.state_dict())


def test_a_source_made_in_inference_mode(slots, root, x) -> None:
    with torch.inference_mode():
        net = Net().to(root)
        expected = net(x)
    wrapped = DataParallel(net, slots)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(wrapped(x), expected)
            torch.testing.assert_close(wrapped(x), expected)


def assign(name: str, value: Callable[[Tensor], Any]) -> Callable[[nn.Module], None]:
    return lambda replica: setattr(replica.linear.weight, name, value(replica.linear.weight))


@torch.enable_grad()
def hooked(replica: nn.Module) -> None:
    replica.linear.weight.register_hook(lambda grad: grad)


@torch.enable_grad()
def hooked_after(replica: nn.Module) -> None:
    replica.linear.bias.register_post_accumulate_grad_hook(lambda parameter: None)


@torch.enable_grad()
def no_leaf(replica: nn.Module) -> None:
    if replica.shift.device.index and not torch.is_inference_mode_enabled():
        replica.linear.weight.requires_grad_(False)
        replica.linear.weight.add_(torch.ones((), device=replica.shift.device, requires_grad=True))


def other_dtype(replica: nn.Module) -> None:
    if replica.shift.device.index:
        replica.shift.data = replica.shift.data.view(torch.int32)


def elsewhere_in_place(replica: nn.Module) -> None:
    if replica.shift.device.index:
        with torch.no_grad():
            replica.linear.weight.zero_()
            replica.shift.zero_()


LEAVES = {
    "data =": assign("data", lambda weight: weight.data * 0),
    "data = the same memory transposed": assign("data", lambda weight: weight.data.t()),
    "data = a part": lambda replica: setattr(replica.linear.bias, "data", replica.linear.bias.data[:1]),
    "data = a neighbour": lambda replica: setattr(
        replica.linear.bias, "data", replica.linear.bias.data.as_strided((4,), (1,), 0)
    ),
    "data = no elements elsewhere": lambda replica: (
        setattr(replica.none, "data", torch.empty(0, dtype=torch.float64)) if replica.none.device.index else None
    ),
    "data = conjugated": lambda replica: setattr(replica.phase, "data", replica.phase.data.conj()),
    "data = another dtype": other_dtype,
    "grad": assign("grad", torch.ones_like),
    "a python attribute": assign("note", lambda weight: weight.device),
    "another class": assign("__class__", lambda weight: type("Other", (nn.Parameter,), {})),
    "requires_grad": assign("requires_grad", lambda weight: False),
    "a hook": hooked,
    "a hook for later": hooked_after,
    "no leaf": no_leaf,
    "in place": elsewhere_in_place,
}


def state_of(replica: nn.Module) -> list[Any]:
    """All of a replica's tensors but their memory."""
    return [
        (type(t), t.dtype, t.device == replica.fixed.device, t.shape, t.stride(), t.storage_offset(), t.requires_grad,
         t.is_leaf, t.is_conj(), t.grad if t.is_leaf else 0, {**vars(t)}, t._backward_hooks,
         t._post_accumulate_grad_hooks)
        for t in (*replica.parameters(), *replica.buffers())
    ]  # fmt: skip


@pytest.mark.parametrize("leaves", LEAVES.values(), ids=LEAVES.keys())
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_what_a_forward_leaves_on_tensors_is_dropped(leaves, fails, wrapped, call, same_as_one_device) -> None:
    same_as_one_device()
    clean: list[Any] = []
    DOES.append(lambda replica: clean.append(state_of(replica)))
    call()
    DOES[:] = [leaves]
    if fails:
        DOES.append(lambda replica: 1 / 0)
    try:
        call()
    except ZeroDivisionError:
        assert fails
    except RuntimeError:
        pass  # shapes do not fit any more
    else:
        assert not fails
    after: list[Any] = []
    DOES[:] = [lambda replica: after.append(state_of(replica))]
    same_as_one_device()
    assert sorted(map(str, after)) == sorted(map(str, clean))


def test_what_is_left_on_tensors_is_freed_with_the_call(call) -> None:
    left = []

    def leave(replica: nn.Module) -> None:
        act, grad, data = (torch.ones_like(replica.fixed) for _ in range(3))
        left.extend(map(weakref.ref, (act, grad)))
        replica.linear.weight.act = act
        replica.fixed.grad = grad
        replica.fixed.data = data

    DOES.append(leave)
    call()
    call()
    assert len(left) == 12
    assert not any(tensor() is not None for tensor in left)


@pytest.mark.devices("cpu")
def test_nested_tensors(slots, x) -> None:
    net = Net()
    net.ragged = nn.Buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    wrapped = DataParallel(net, slots)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(wrapped(x), net(x))
