"""Replicas whose tensors stay serve one call after the other, each as if it were new."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard, replicate
from freed_later import freed_later
from nets import DOES, Net


@pytest.fixture(params=[replicate, fully_shard], ids=["replicate", "fully_shard"])
def net(request: pytest.FixtureRequest, slots: list, root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    net = request.param(Net().double().to(root), devices=slots)
    for _ in range(2):  # in which the order of gradients is learnt
        net(torch.randn(9, 4, dtype=torch.float64, device=root)).sum().backward()
    return net


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(root)


def modules_of(net: nn.Module, x: Tensor, *does: Callable[[Any], Any]) -> set[Any]:
    """The modules of all replicas of one call, which also does the rest."""
    found: set[Any] = set()
    DOES[:] = [lambda replica: found.update(replica.modules()), *does]
    net(x)
    DOES.clear()
    return found


def rename(attributes: dict[str, Any], name: str, other: str) -> None:
    """Everything else stays, the order too."""
    items = [*attributes.items()]
    attributes.clear()
    attributes.update({other if key == name else key: value for key, value in items})


def test_modules_serve_later_calls(net: nn.Module, x: Tensor, slots: list) -> None:
    first = modules_of(net, x)
    assert len(first) == len(slots) * len([*net.modules()])
    assert modules_of(net, x) == first
    with torch.no_grad():
        assert modules_of(net, x) == first


@pytest.mark.parametrize("net", [replicate], indirect=True)
def test_new_copies_are_in_new_replicas(net: nn.Module, x: Tensor) -> None:
    first = modules_of(net, x)
    net.linear.weight.data = net.linear.weight.data * 2
    assert not modules_of(net, x) & first


def test_a_change_of_the_source_is_seen(net: nn.Module, x: Tensor) -> None:
    first = modules_of(net, x)
    net.inner.register_forward_hook(lambda module, args, output: output * 0)
    net.left = 1
    assert not modules_of(net, x) & first


@pytest.mark.parametrize(
    "leave",
    [
        lambda replica: setattr(replica, "left", 1),
        lambda replica: delattr(replica.inner, "training"),
        lambda replica: replica.register_forward_hook(lambda module, args, output: output * 0),
        lambda replica: replica.add_module("left", nn.Identity()),
        lambda replica: setattr(replica, "inner", nn.Identity()),
        lambda replica: setattr(replica.inner, "__class__", nn.Identity),
        lambda replica: replica._non_persistent_buffers_set.add("shift"),
        lambda replica: rename(vars(replica), "scale", "left"),
        lambda replica: vars(replica).update(_parameters={}, _modules={}),
    ],
    ids=[
        *("an attribute", "no attribute", "a hook", "a child", "another child", "a class", "a name"),
        *("another name", "other registries"),
    ],
)
def test_what_a_forward_leaves_is_gone_with_the_replicas(leave: Callable, net: nn.Module, x: Tensor) -> None:
    before = modules_of(net, x)
    expected = net(x)
    modules_of(net, x, leave)
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)
    assert not modules_of(net, x) & before


@pytest.mark.parametrize(
    "leave",
    [
        lambda replica: delattr(replica.linear, "weight"),
        lambda replica: setattr(replica.linear, "weight", nn.Parameter(torch.zeros(4, 4).to(replica.linear.weight))),
        lambda replica: replica.register_buffer("left", torch.ones(1)),
        lambda replica: rename(replica._buffers, "shift", "left"),
    ],
    ids=["no parameter", "another parameter", "a buffer", "a buffer's name"],
)
@pytest.mark.parametrize("net", [replicate], indirect=True)
def test_what_a_forward_registers_is_not_there_in_the_next_call(leave: Callable, net: nn.Module, x: Tensor) -> None:
    expected, names = net(x), [*net.state_dict()]
    try:
        modules_of(net, x, leave)
    except AttributeError:
        DOES.clear()
    listed: list[list[str]] = []
    DOES[:] = [lambda replica: listed.append([*replica.state_dict()])]
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)
    DOES.clear()
    assert [sorted(each) for each in listed] == [sorted(names)] * len(listed)


@freed_later
def test_memory_of_a_new_attribute_is_free_after_the_call(net: nn.Module, x: Tensor) -> None:
    made: list[weakref.ref[Tensor]] = []

    def leave(replica: Any) -> None:
        replica.inner.last = torch.ones(3)
        made.append(weakref.ref(replica.inner.last))

    modules_of(net, x, leave)
    assert len(made) > 1
    assert not any(each() is not None for each in made)


def test_an_attribute_that_is_set_between_calls_is_not_seen(net: nn.Module, x: Tensor) -> None:
    held: list[Any] = []
    expected = net(x)
    modules_of(net, x, held.append)
    for replica in held:
        replica.register_forward_hook(lambda module, args, output: output * 0)
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)


def test_a_call_while_another_runs_has_replicas_of_its_own(x: Tensor, slots: list, root: torch.device) -> None:
    net = replicate(Net().double().to(root), devices=slots, serial=True)
    with torch.no_grad():
        expected = net(x)
    ids: list[list[int]] = [[]]  # of the replicas of each call

    def note(replica: Any) -> None:
        ids[-1].append(id(replica))
        if len(ids) == 1:  # the first replica makes another call
            ids.append([])
            torch.testing.assert_close(net(x), expected)
            ids.append(ids[0])

    DOES[:] = [note]
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
    DOES.clear()
    outer, inner, _ = ids
    assert len(outer) == len(inner) == len(slots)
    assert not {*outer} & {*inner}
