"""A replicated module's ``forward`` looks as before: a function on the class, a method on the module."""

import copy
import functools
import inspect
import pickle
import types

import pytest
import torch
from torch import nn

from affine import Affine, build_affine
from dataparallel.composable import ReplicatedModule, register_forward_method, replicate


@pytest.fixture
def plain(root):
    return build_affine(root)


@pytest.fixture
def affine(plain, slots):
    return replicate(copy.deepcopy(plain), devices=slots)


class TestOnTheClass:
    def test_it_is_a_function_with_the_signature_of_the_original(self, affine):
        forward = type(affine).forward
        assert inspect.isfunction(forward)
        assert inspect.signature(forward) == inspect.signature(Affine.forward)
        assert (forward.__name__, forward.__doc__) == ("forward", "Scales.")
        assert inspect.unwrap(forward) is Affine.forward
        assert forward is type(affine).forward

    def test_so_is_a_method_that_is_registered(self, affine):
        register_forward_method(affine, "encode")
        assert inspect.signature(type(affine).encode) == inspect.signature(Affine.encode)

    def test_a_static_method_is_what_it_was(self, affine, batch):
        register_forward_method(affine, "twice")
        assert type(affine).twice is Affine.twice
        torch.testing.assert_close(affine.twice(batch), batch * 2)

    def test_called_with_the_module_it_splits(self, affine, plain, batch):
        torch.testing.assert_close(type(affine).forward(affine, batch, scale=2.0), plain(batch, scale=2.0))
        assert sorted(affine.sizes) == [1, 3, 3]

    def test_called_with_a_module_that_is_not_replicated_it_does_not(self, affine, plain, batch):
        torch.testing.assert_close(type(affine).forward(plain, batch), plain(batch))
        assert plain.sizes == [7, 7]

    def test_a_forward_that_the_class_gets_later_is_seen(self, slots, batch, root):
        class Late(Affine):
            def forward(self, x):
                return self.linear(x)

        late = replicate(Late().double().to(root), devices=slots)
        Late.forward = lambda self, y: self.linear(y) - 1
        assert list(inspect.signature(type(late).forward).parameters) == ["self", "y"]
        torch.testing.assert_close(late(batch), late.linear(batch) - 1)

    def test_a_class_that_no_module_has_shows_no_function(self):
        assert not inspect.isfunction(ReplicatedModule.forward)


class TestOnTheModule:
    def test_it_is_a_bound_method(self, affine, slots, plain):
        assert isinstance(affine.forward, types.MethodType)
        assert affine.forward.__self__ is affine
        assert affine.forward == affine.forward
        assert hash(affine.forward) == hash(affine.forward)
        assert affine.forward != replicate(plain, devices=slots).forward

    def test_equal_while_it_is_held(self, affine):
        held = affine.forward
        assert held == affine.forward

    @pytest.mark.slots(1, 3)
    def test_wrapped_as_accelerate_does_it_and_unwrapped(self, affine, plain, batch):
        def around(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return function(*args, **kwargs) + 1

            return wrapper

        affine.before = affine.forward
        affine.forward = types.MethodType(around(affine.forward.__func__), affine)
        affine.forward = types.MethodType(around(affine.forward.__func__), affine)
        torch.testing.assert_close(affine(batch), plain(batch) + 2)
        assert inspect.signature(affine.forward) == inspect.signature(plain.forward)
        affine.forward = types.MethodType(inspect.unwrap(affine.forward.__func__), affine)
        del affine.before
        affine.sizes.clear()
        torch.testing.assert_close(affine(batch), plain(batch))
        assert sum(affine.sizes) == 7

    @pytest.mark.slots(1, 3)
    def test_a_forward_around_the_one_before(self, affine, plain, batch):
        former = affine.forward
        affine.forward = lambda x: former(x) + 1
        again = affine.forward
        affine.forward = lambda x: again(x) * 2
        torch.testing.assert_close(affine(batch), (plain(batch) + 1) * 2)

    def test_a_method_of_another_object(self, affine, plain, batch):
        class Other:
            def run(self, x):
                return x.exp()

        affine.forward = Other().run
        torch.testing.assert_close(affine(batch), batch.exp())

    def test_an_argument_may_have_any_name(self, slots, root, batch):
        class Odd(nn.Linear):
            def forward(self, module, cls, name):
                return super().forward(module) + cls + name

        odd = replicate(Odd(4, 3).double().to(root), devices=slots)
        torch.testing.assert_close(odd(module=batch, cls=1, name=2), nn.Linear.forward(odd, batch) + 3)

    def test_a_pickled_method_is_refused_as_the_module_is(self, affine):
        with pytest.raises(TypeError, match="cannot pickle a module that is managed by `replicate`"):
            pickle.dumps(affine.forward)


class TestSymbolicTracing:
    @pytest.fixture
    def layers(self, root):
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double().to(root)

    def test_the_graph_is_that_of_one_device(self, layers, slots, batch):
        expected, graph = layers(batch), torch.fx.symbolic_trace(layers).graph
        traced = torch.fx.symbolic_trace(replicate(layers, devices=slots))
        assert str(traced.graph) == str(graph)
        torch.testing.assert_close(traced(batch), expected)

    def test_a_parent_traces_too(self, layers, slots, batch):
        parent = nn.Sequential(layers, nn.Linear(3, 2).to(batch))
        expected = parent(batch)
        replicate(layers, devices=slots)
        torch.testing.assert_close(torch.fx.symbolic_trace(parent)(batch), expected)


class TestWithoutDevices:
    @pytest.fixture
    def affine(self, plain, monkeypatch):
        monkeypatch.setattr("dataparallel.devices.accelerator_type", lambda: None)
        return replicate(copy.deepcopy(plain))

    def test_a_forward_around_the_one_before(self, affine, plain, batch):
        former = affine.forward
        affine.forward = lambda x: former(x) + 1
        torch.testing.assert_close(affine(batch), plain(batch) + 1)
        assert affine.sizes == [7]

    def test_the_compiler_goes_through(self, affine, plain, batch):
        compiled = torch.compile(lambda x: affine(x) * 2, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(batch), plain(batch) * 2)
