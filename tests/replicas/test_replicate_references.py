"""Attributes of an instance that refer to the tree refer to the replica in a replica, and lead to its own weights.

What else the objects that refer to the tree keep is in test_references.
"""

import functools
import types
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dataparallel import replicate
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.parity import Perturbation, assert_same_step
from each_form import Form, replicating_forms

PERTURBATION = Perturbation(seed=3, scale=0.5)
samples = numbers(4)


class WithReferences(nn.Module):
    """Two layers, a weight and a forward; `setup` sets attributes of the instance."""

    def __init__(
        self, setup: Callable[["WithReferences"], Any], forward: Callable[["WithReferences", Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.run = forward
        setup(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def scaled(self, x: Tensor) -> Tensor:
        return self.first(x) * self.scale


def hang(**attributes: Callable[[WithReferences], Any]) -> Callable[[WithReferences], None]:
    """Sets plain attributes, past the registries."""

    def setup(net: WithReferences) -> None:
        for name, make in attributes.items():
            vars(net)[name] = make(net)

    return setup


def both_layers(net: WithReferences, x: Tensor) -> Tensor:
    return net.second(net.first(x))


def rebind_forward(net: WithReferences) -> None:
    net.first.forward = types.MethodType(lambda self, x: 2 * F.linear(x, self.weight), net.first)


def rebind_call_of_the_root(net: WithReferences) -> None:
    net.forward = types.MethodType(lambda self, x: self.scaled(x) + self.scale, net)


def decorate_forward(net: WithReferences) -> None:
    method = net.first.forward

    @functools.wraps(method)
    def twice(x: Tensor) -> Tensor:
        return method(method(x))

    net.first.forward = twice


def a_hook_of_the_parent(net: WithReferences) -> None:
    net.first.register_forward_hook(lambda module, args, output: output * net.scale)


def a_weak_parent(net: WithReferences) -> None:
    net.first.above = weakref.ref(net)
    net.first.forward = types.MethodType(lambda self, x: F.linear(x, self.weight) * self.above().scale, net.first)


class Doubled:
    """Stands in the place of a method, by itself or by its own method."""

    def __init__(self, method: Callable[[Tensor], Tensor]) -> None:
        self.method = method

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * self.method(x)

    def run(self, x: Tensor) -> Tensor:
        return self(x)


def an_object_as_forward(net: WithReferences) -> None:
    net.first.forward = Doubled(net.first.forward)


def a_method_of_an_object_as_forward(net: WithReferences) -> None:
    net.first.forward = Doubled(net.first.forward).run


def an_object_around_an_object(net: WithReferences) -> None:
    net.first.forward = Doubled(Doubled(net.first.forward))


def a_closure_with_an_empty_cell(net: WithReferences) -> Any:
    def function(x: Tensor) -> Tensor:
        return net.first(x) if x is not None else later

    if net is None:
        later = 1
    return function


def a_closure_that_calls_itself(net: WithReferences) -> Any:
    def count(x: Tensor, steps: int = 2) -> Tensor:
        return count(net.first(x), steps - 1) if steps else x

    return count


Pair = namedtuple("Pair", "left right")

HELD: dict[str, tuple[Callable[[WithReferences], Any], Callable[[Any, Tensor], Tensor]]] = {
    "bound method": (lambda net: net.scaled, lambda held, x: held(x)),
    "partial": (lambda net: functools.partial(F.linear, weight=net.first.weight), lambda held, x: held(x)),
    "partial of a method": (lambda net: functools.partial(net.scaled), lambda held, x: held(x)),
    "closure with an empty cell": (a_closure_with_an_empty_cell, lambda held, x: held(x)),
    "closure that calls itself": (a_closure_that_calls_itself, lambda held, x: held(x)),
    "closure over a parameter": (lambda net: (lambda scale: lambda x: x * scale)(net.scale), lambda held, x: held(x)),
    "built-in method of a parameter": (lambda net: net.scale.mul, lambda held, x: held(x)),
    "weak method": (lambda net: weakref.WeakMethod(net.scaled), lambda held, x: held()(x)),
    "tuple": (lambda net: (net.first, 1), lambda held, x: held[0](x)),
    "namedtuple": (lambda net: Pair(1, net.first), lambda held, x: held.right(x)),
    "set": (lambda net: {net.first}, lambda held, x: next(iter(held))(x)),
    "dict": (lambda net: {"x": net.first, "y": 1}, lambda held, x: held["x"](x)),
    "OrderedDict": (lambda net: OrderedDict(x=net.scaled), lambda held, x: held["x"](x)),
    "list of closures": (lambda net: [lambda x: net.first(x)], lambda held, x: held[0](x)),
}
"""What hangs on the instance, and how it is used."""

WAYS: dict[str, tuple[Callable[[WithReferences], Any], Callable[[WithReferences, Tensor], Tensor]]] = {
    **{
        name: (hang(held=make), lambda net, x, use=use: use(net.held, x))  # type: ignore[misc]
        for name, (make, use) in HELD.items()
    },
    "forward bound to a child": (rebind_forward, both_layers),
    "forward bound to the root": (rebind_call_of_the_root, both_layers),
    "decorated forward": (decorate_forward, both_layers),
    "object in the place of forward": (an_object_as_forward, both_layers),
    "method of an object in the place of forward": (a_method_of_an_object_as_forward, both_layers),
    "object around an object": (an_object_around_an_object, both_layers),
    "closure": (hang(enter=lambda net: lambda x: net.first(x) * net.scale), lambda net, x: net.enter(x)),
    "module": (hang(again=lambda net: net.first), lambda net, x: net.again(x)),
    "parameter": (hang(weight=lambda net: net.first.weight), lambda net, x: x @ net.weight),
    "modules in a list": (
        hang(route=lambda net: [net.second, net.first]),
        lambda net, x: functools.reduce(lambda value, layer: layer(value), net.route, x),
    ),
    "hook over the parent": (a_hook_of_the_parent, both_layers),
    "weak parent": (a_weak_parent, both_layers),
}


@replicating_forms
@pytest.mark.parametrize(("setup", "forward"), WAYS.values(), ids=WAYS.keys())
def test_every_way_leads_to_the_weights_of_the_replica(
    setup: Callable, forward: Callable, form: Form, slots: list
) -> None:
    build = seeded(WithReferences, setup, forward)
    assert_same_step(build, samples(7, 1), slots, perturbation=PERTURBATION, wrap=form)


def test_the_source_keeps_what_hangs_on_it(slots: list) -> None:
    net = WithReferences(hang(route=lambda net: [net.first], table=lambda net: {"in": net.scaled}), both_layers)
    route, table = net.route, net.table
    replicas = replicate(net, slots)
    assert net.route is route
    assert net.route[0] is net.first
    assert net.table is table
    assert net.table["in"].__self__ is net
    for replica in replicas:
        assert replica.route[0] is replica.first
        assert replica.table["in"].__self__ is replica


def test_attributes_that_lead_elsewhere_are_the_same_objects(slots: list) -> None:
    stranger = nn.Linear(1, 1)
    values = {"config": {"depth": 3}, "other": [stranger], "enter": torch.relu, "array": np.zeros(3), "cls": nn.Linear}
    values |= {"partial": functools.partial(len), "pair": Pair(1, stranger), "closure": lambda: stranger}
    values["generator"] = torch.Generator()
    values["tokenizer"] = Doubled(len)  # stands for no method of the module
    net = WithReferences(lambda net: vars(net).update(values), len)
    for replica in replicate(net, slots):
        assert all(getattr(replica, name) is value for name, value in values.items())
