"""``forward`` of a form is a method, which shows the module's signature where the form changes a module in place."""

import copy
import functools
import inspect
import types

import pytest
import torch
from torch import nn

from affine import Affine, build_affine
from dataparallel import DataParallel
from dataparallel.composable import register_forward_method, replicate
from each_form import replicated, replicating_forms


@pytest.fixture
def plain(root):
    return build_affine(root)


@pytest.fixture
def model(form, plain, slots):
    """A copy of the plain module in a form."""
    return form(copy.deepcopy(plain), slots)


def module_of(model):
    return model.module if isinstance(model, DataParallel) else model


FORWARDS = {
    "as it is": lambda net: net.forward,
    "a lambda": lambda net: lambda x, scale=2.0: net.linear(x) * scale,
    "a partial": lambda net: functools.partial(Affine.forward, net, scale=3.0),
    "a method": lambda net: types.MethodType(lambda self, x, scale=4.0: self.linear(x) * scale, net),
}


@replicating_forms
class TestBothForms:
    @pytest.mark.parametrize("made", FORWARDS.values(), ids=FORWARDS)
    def test_it_runs_the_forward_that_the_module_has(self, model, batch, plain, made):
        module = module_of(model)
        if made is not FORWARDS["as it is"]:
            module.forward = made(module)
            plain.forward = made(plain)
        if not isinstance(model, DataParallel):
            assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        for call in (model, model.forward):
            torch.testing.assert_close(call(batch), plain(batch))

    def test_it_stays_a_method(self, form, model, plain, slots):
        assert isinstance(model.forward, types.MethodType)
        assert model.forward.__self__ is model
        assert model.forward == model.forward
        assert hash(model.forward) == hash(model.forward)
        assert model.forward != form(plain, slots).forward

    @pytest.mark.slots(1, 3)
    def test_wrapped_as_accelerate_does_it_and_unwrapped(self, model, plain, batch):
        def around(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return function(*args, **kwargs) + 1

            return wrapper

        for _ in range(2):
            model.forward = types.MethodType(around(model.forward.__func__), model)
        torch.testing.assert_close(model(batch), plain(batch) + 2)
        if not isinstance(model, DataParallel):
            assert inspect.signature(model.forward) == inspect.signature(plain.forward)

    @pytest.mark.slots(1, 3)
    def test_a_forward_around_the_one_before(self, model, plain, batch):
        former = model.forward
        model.forward = lambda x: former(x) + 1
        again = model.forward
        model.forward = lambda x: again(x) * 2
        torch.testing.assert_close(model(batch), (plain(batch) + 1) * 2)

    @pytest.mark.slots(2)
    def test_without_devices_the_compiler_goes_through(self, form, plain, batch, monkeypatch):
        monkeypatch.setattr("dataparallel.devices.accelerator_type", lambda: None)
        model = form(copy.deepcopy(plain))
        compiled = torch.compile(lambda x: model(x, scale=2.0) + 1, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(batch), plain(batch, scale=2.0) + 1)


def test_subclasses_of_the_wrapper_override_it_and_call_it(plain, slots, batch):
    class Doubled(DataParallel):
        def forward(self, x):
            return super().forward(x) * 2

    torch.testing.assert_close(Doubled(plain, slots)(batch), plain(batch) * 2)


class TestReplicated:
    @pytest.fixture
    def model(self, plain, slots):
        return replicated(copy.deepcopy(plain), slots)

    def test_a_forward_that_is_set_later_is_shown(self, model):
        assert list(inspect.signature(model.forward).parameters) == ["x", "scale", "offset"]
        model.forward = lambda y: y
        assert list(inspect.signature(model.forward).parameters) == ["y"]
        del model.forward
        assert list(inspect.signature(model.forward).parameters) == ["x", "scale", "offset"]

    def test_on_the_class_it_is_the_function_of_the_original(self, model, plain, batch):
        forward = type(model).forward
        assert inspect.isfunction(forward)
        assert inspect.signature(forward) == inspect.signature(Affine.forward)
        assert inspect.unwrap(forward) is Affine.forward
        torch.testing.assert_close(forward(model, batch, scale=2.0), plain(batch, scale=2.0))
        assert sorted(model.sizes) == [1, 3, 3]
        plain.sizes.clear()
        torch.testing.assert_close(forward(plain, batch), plain(batch))
        assert plain.sizes == [7, 7], "of a module that is not replicated it does not split"

    def test_registered_methods_too(self, model, batch):
        register_forward_method(model, "encode")
        assert inspect.signature(type(model).encode) == inspect.signature(Affine.encode)
        register_forward_method(model, "twice")
        assert type(model).twice is Affine.twice, "a static method is what it was"
        torch.testing.assert_close(model.twice(batch), batch * 2)

    def test_an_argument_may_have_any_name(self, slots, root, batch):
        class Odd(nn.Linear):
            def forward(self, module, cls, name):
                return super().forward(module) + cls + name

        odd = replicate(Odd(4, 3).double().to(root), devices=slots)
        torch.testing.assert_close(odd(module=batch, cls=1, name=2), nn.Linear.forward(odd, batch) + 3)

    def test_torch_fx_traces_it_as_on_one_device(self, slots, root, batch):
        layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double().to(root)
        graph = torch.fx.symbolic_trace(layers).graph
        replicate(layers, devices=slots)
        assert str(torch.fx.symbolic_trace(layers).graph) == str(graph)
