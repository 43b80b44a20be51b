"""`replicate` changes how a module runs, and nothing else of it. A call runs on the slots."""

import inspect
import types

import pytest
import torch
from torch import nn

import dataparallel
import dataparallel.composable
from affine import Affine
from dataparallel import DataParallel
from dataparallel.composable import fully_shard, register_forward_method, replicate


@pytest.fixture
def layers(root):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double().to(root)


class TestForwardMethods:
    def test_one_more_method_runs_on_the_slots(self, affine, slots, batch):
        replicate(affine, devices=slots)
        register_forward_method(affine, "generate")
        torch.testing.assert_close(affine.generate(batch, 0.5), affine.linear(batch) + 0.5)
        assert sorted(affine.sizes) == [1, 1, 3, 3, 3, 3]  # once each in generate and in the forward that it calls
        assert affine.generate.__doc__ == "Adds."
        assert list(inspect.signature(affine.generate).parameters) == ["x", "offset"]

    def test_a_method_that_is_not_registered_runs_where_it_is(self, affine, slots, batch, root):
        other = replicate(Affine().double().to(root), devices=slots)
        register_forward_method(replicate(affine, devices=slots), "generate")
        torch.testing.assert_close(other.generate(batch, 0.5), other.linear(batch) + 0.5)
        assert sorted(other.sizes) == [1, 3, 3, 7]

    def test_what_cannot_be_registered(self, affine, slots):
        with pytest.raises(TypeError, match=r"this Affine is not replicated; call replicate\(module\) before"):
            register_forward_method(affine, "generate")
        replicate(affine, devices=slots)
        with pytest.raises(AttributeError, match="a Affine has no method 'nothing'"):
            register_forward_method(affine, "nothing")
        with pytest.raises(TypeError, match="'sizes' of this Affine is no method"):
            register_forward_method(affine, "sizes")


class TestRefusedAtApplication:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"ignored_modules": [nn.Linear(1, 1)]}, r"ignored_modules\[0\], a Linear, is not below"),
            ({"ignored_params": [nn.Parameter(torch.zeros(1))]}, r"ignored_params\[0\] is no parameter"),
        ],
    )
    def test_arguments(self, layers, slots, arguments, message):
        with pytest.raises(ValueError, match=message):
            replicate(layers, **{"devices": slots, **arguments})
        assert type(layers) is nn.Sequential
        replicate(layers, devices=slots)

    @pytest.mark.parametrize("kind", [list, set, iter], ids=lambda kind: kind.__name__)
    def test_ignored_modules_are_the_second_argument_as_in_torch(self, layers, slots, batch, kind):
        expected = layers(batch)
        replicate(layers, kind([layers[2]]), devices=slots)
        state = replicate.state(layers)
        assert [state.manages(parameter) for parameter in layers.parameters()] == [True, True, False, False]
        if layers[2].weight.device.type == "cpu":
            torch.testing.assert_close(layers(batch), expected)

    def test_devices_in_its_place_are_refused(self, layers, slots):
        with pytest.raises(
            TypeError, match=r"ignored_modules\[0\]=.*: expected a torch\.nn\.Module; slots are named: dev"
        ):
            replicate(layers, slots)


def frozen(module, slots):
    """A wrapper that keeps replicas inside `frozen`."""
    wrapped = DataParallel(module, slots)

    def run(x):
        with wrapped.options.frozen(), torch.no_grad():
            return wrapped(x)

    return run


WAYS_TO_REPLICATE = {
    "DataParallel": DataParallel,
    "frozen": frozen,
    "replicate": lambda module, slots: lambda x: dataparallel.replicate(module, slots),
}
"""Each has the module replicated, and returns a function that calls it."""


class TestCall:
    @pytest.mark.parametrize(("broadcast_buffers", "expected"), [(True, [4, 6, 6]), (False, [2, 6, 6])])
    def test_buffers_are_sent_at_each_call_or_once(self, slots, root, batch, broadcast_buffers, expected):
        counts = []

        class Counts(Affine):
            def forward(self, x):
                self.calls += len(x)
                counts.append(int(self.calls))
                return self.linear(x)

        module = replicate(Counts().double().to(root), devices=slots, broadcast_buffers=broadcast_buffers)
        module(batch)
        counts.clear()
        module(batch)
        assert sorted(counts) == expected


class TestHooks:
    def test_a_method_that_calls_the_module_runs_them_in_each_replica(self, affine, slots, batch):
        affine.register_forward_hook(lambda module, args, output: output + 1)
        affine.twice = types.MethodType(lambda self, x: 2 * self(x), affine)
        expected = affine.twice(batch)
        register_forward_method(replicate(affine, devices=slots), "twice")
        for _ in range(2):
            torch.testing.assert_close(affine.twice(batch), expected)
            torch.testing.assert_close(2 * affine(batch), expected)


class TestErrors:
    @pytest.mark.parametrize("apply", WAYS_TO_REPLICATE.values(), ids=WAYS_TO_REPLICATE)
    @pytest.mark.parametrize("inside", [replicate, fully_shard])
    def test_a_managed_module_inside_another_tree(self, slots, root, batch, apply, inside):
        """The error has its path in that tree. Without it the tree can be replicated."""
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        outer = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": layers})}).double().to(root)
        outer.forward = types.MethodType(lambda self, x: self["encoder"]["layers"][0](x), outer)
        run = apply(outer, slots)
        run(batch)
        layers.append(inside(nn.Linear(4, 4).double().to(root), devices=slots))
        refused = rf"^cannot replicate 'encoder\.layers\.3', a Linear: it is managed by `{inside.__name__}` already"
        with pytest.raises(RuntimeError, match=refused):
            run(batch)
        del layers[3]
        run(batch)

    @pytest.mark.parametrize("apply", WAYS_TO_REPLICATE.values(), ids=WAYS_TO_REPLICATE)
    def test_a_module_that_is_replicated_while_it_is_wrapped(self, affine, slots, batch, apply):
        run = apply(affine, slots)
        run(batch)
        replicate(affine, devices=slots)
        for call in (lambda: run(batch), affine._replicate_for_data_parallel):  # which other libraries call
            with pytest.raises(RuntimeError, match=r"^cannot replicate the Affine: it is managed by `replicate` alrea"):
                call()

    def test_a_class_that_has_changed_since(self, slots, root, batch):
        module = replicate(nn.Linear(4, 3).double().to(root), devices=slots)
        nn.utils.parametrizations.weight_norm(module)
        with pytest.raises(RuntimeError, match="the class of this Linear is another one than `replicate` gave to it"):
            module(batch)

    @pytest.mark.devices("sim", "cuda")
    @pytest.mark.parametrize("settled", [True, False], ids=["later", "at the first forward"])
    def test_a_parameter_on_another_device(self, layers, slots, batch, root, settled):
        expected = layers(batch)
        replicate(layers, devices=slots)
        if settled:
            layers(batch)
        for other in {torch.device("cpu"), torch.device(slots[1])} - {root}:
            there = layers[2].bias.data
            layers[2].bias.data = there.to(other)
            message = rf"on device: {other}\. It is parameter '2\.bias'; call module\.to\('{root}'\)"
            with pytest.raises(RuntimeError, match=message):
                layers(batch)
            layers[2].bias.data = there
            torch.testing.assert_close(layers(batch), expected)
