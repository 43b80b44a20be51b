"""`DataParallel.forward` shows the signature of the module's forward, and is a method in every other respect."""

import copy
import functools
import inspect
import types
import typing

import pytest
import torch
from torch import nn

from affine import Affine, build_affine
from dataparallel import DataParallel
from dataparallel.forms.managed import StandIns
from nets import samples

pytestmark = pytest.mark.devices("cpu")  # signatures do not depend on devices


@pytest.fixture
def net(root):
    return build_affine(root)


@pytest.fixture
def x(root):
    return samples(root)


def as_they_are(net):
    return net.forward


def a_lambda(net):
    return lambda x, scale=2.0: net.linear(x) * scale


def a_partial(net):
    return functools.partial(Affine.forward, net, scale=3.0)


def a_method(net):
    return types.MethodType(lambda self, x, scale=4.0: self.linear(x) * scale, net)


@pytest.mark.parametrize("made", [as_they_are, a_lambda, a_partial, a_method])
def test_it_shows_the_signature_of_the_module(wrapped, net, x, made):
    net.forward = made(net)
    assert inspect.signature(wrapped.forward) == inspect.signature(net.forward)
    expected = net(x)
    torch.testing.assert_close(wrapped(x), expected)
    torch.testing.assert_close(wrapped.forward(x), expected)


def test_a_forward_that_is_set_later_is_shown(wrapped, net):
    assert list(inspect.signature(wrapped.forward).parameters) == ["x", "scale", "offset"]
    net.forward = lambda y: y
    assert list(inspect.signature(wrapped.forward).parameters) == ["y"]
    del net.forward
    assert list(inspect.signature(wrapped.forward).parameters) == ["x", "scale", "offset"]


def test_another_module_shows_its_own(wrapped, slots, root):
    other = DataParallel(nn.Linear(4, 3).to(root), slots)
    assert list(inspect.signature(other.forward).parameters) == ["input"]
    assert list(inspect.signature(wrapped.forward).parameters) == ["x", "scale", "offset"]


def test_it_stays_a_method(wrapped, net, slots):
    other = DataParallel(net, slots)
    assert wrapped.forward == wrapped.forward
    assert wrapped.forward != other.forward
    assert wrapped.forward.__self__ is wrapped
    assert wrapped.forward.__name__ == "forward"
    assert wrapped.forward.__doc__ == DataParallel.forward.__doc__


def test_what_is_put_around_the_bare_function_still_splits(wrapped, net, x):
    bare = wrapped.forward.__func__
    wrapped.forward = types.MethodType(lambda self, x, **kwargs: bare(self, x, **kwargs) + 1, wrapped)
    torch.testing.assert_close(wrapped(x, scale=2.0), net(x, scale=2.0) + 1)


def test_on_the_class_it_is_a_function(net, x, wrapped):
    assert inspect.isfunction(DataParallel.forward)
    assert list(inspect.signature(DataParallel.forward).parameters) == ["self", "inputs", "kwargs"]
    torch.testing.assert_close(DataParallel.forward(wrapped, x), net(x))


def test_subclasses_override_it_and_call_it(net, slots, x):
    class Doubled(DataParallel):
        def forward(self, x):
            return super().forward(x) * 2

    assert list(inspect.signature(Doubled(net, slots).forward).parameters) == ["x"]
    torch.testing.assert_close(Doubled(net, slots)(x), net(x) * 2)


def test_a_copy_shows_the_copied_module(wrapped, net):
    copied = copy.deepcopy(wrapped)
    net.forward = lambda y: y
    assert list(inspect.signature(copied.forward).parameters) == ["x", "scale", "offset"]
    assert copied.forward.__self__ is copied


@pytest.mark.slots(2)
def test_without_devices_the_compiler_goes_through(net, x, monkeypatch):
    monkeypatch.setattr("dataparallel.devices.accelerator_type", lambda: None)
    wrapper = DataParallel(net)
    assert wrapper.device_ids == []
    compiled = torch.compile(lambda x: wrapper(x, scale=2.0) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x, scale=2.0) + 1)


def test_one_function_for_each_while_it_is_held():
    made = []

    def make(function):
        @functools.wraps(function)
        def stand_in():
            return function()

        made.append(stand_in.__name__)
        return stand_in

    stand_ins = StandIns(make)
    first = stand_ins.of(as_they_are)
    assert stand_ins.of(as_they_are) is first
    assert stand_ins.of(a_lambda) is not first
    assert made == ["as_they_are", "a_lambda"]
    del first
    stand_ins.of(as_they_are)
    assert made == ["as_they_are", "a_lambda", "as_they_are"]  # nothing is kept that nobody holds


def test_annotations_are_those_that_are_shown(wrapped, net):
    assert typing.get_type_hints(wrapped.forward) == typing.get_type_hints(net.forward)
    elsewhere: dict = {"Tensor": torch.Tensor}
    exec("from __future__ import annotations\ndef forward(x: Tensor) -> Tensor: return x", elsewhere)
    net.forward = elsewhere["forward"]
    assert typing.get_type_hints(wrapped.forward) == {"x": torch.Tensor, "return": torch.Tensor}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_traced_module_has_nothing_to_show(net, slots, x):
    wrapped = DataParallel(torch.jit.trace(net, x), slots)
    assert list(inspect.signature(wrapped.forward).parameters) == ["inputs", "kwargs"]
    torch.testing.assert_close(wrapped(x), net(x))
