"""Frozen, tied, shared and unused parameters of a sharded model, in float64 to 1e-9."""

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from dataparallel.sharded import ShardedTensor
from dataparallel.testing.cases import numbers, seeded, sgd
from dataparallel.testing.steps import assert_equal, mean_square_loss
from sharded_chains import Chain, Layer, assert_same_results, chain
from sharded_models import GPT
from sharded_steps import (
    LOOPS,
    MODELS,
    Model,
    assert_same_training,
    gradients,
    on_device,
    several_loops,
    sharded,
    whole,
)


class Moving(Layer):
    """A layer whose forward gives its weight other memory, as RNNs do on CUDA, where cuDNN wants one buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.clone()
        return super().forward(x)


class TestParameters:
    @pytest.mark.slots(3, long=[2, 8])
    @several_loops
    @pytest.mark.parametrize("stay", [False, True], ids=["freed after forward", "full until backward"])
    def test_forward_may_give_a_parameter_other_memory(self, stay, loop, slots):
        """That memory is gone when the unit is freed, and the next gather is seen."""
        assert_same_training(chain(Layer, Moving, Moving), slots, loop=LOOPS[loop], reshard_after_forward=not stay)

    def test_nothing_takes_a_gradient_but_the_input(self, slots, pair, x):
        def use(model):
            model.requires_grad_(False)
            leaf = x.clone().requires_grad_()
            model(leaf).square().sum().backward()
            return leaf.grad

        assert_same_results(pair, use)

    @several_loops
    def test_tied_weights_in_a_unit_of_several_modules(self, loop, slots):
        """The first module's forward begins the unit's use, and the last one's ends it."""

        class Ends(GPT):
            def units(self) -> list[Any]:
                return [*self.blocks, [self.embedding, self.norm, self.head]]

        assert_same_training(Model(seeded(Ends), MODELS["gpt"].batch), slots, loop=LOOPS[loop])

    def test_complex_parameters(self, slots):
        class Turn(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex128))

            def forward(self, x: Tensor) -> Tensor:
                return (super().forward(x) * self.phase).real

        assert_same_training(chain(Layer, Turn, Layer), slots, optimizer=sgd)

    def test_a_unit_in_channels_last(self, slots):
        def build() -> nn.Module:
            layers = [nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1)]
            return Chain(*layers).to(memory_format=torch.channels_last)

        assert_same_training(Model(seeded(build), numbers(2, 6, 6)), slots)


class TestReferences:
    """Attributes of modules may lead to parameters: lists of weights, partials, closures of hooks."""

    class Referring(nn.Module):
        """``first`` and ``last`` are layers; attributes of ``first`` lead to its own weight or to that of ``last``."""

        def __init__(self, own: bool) -> None:
            super().__init__()
            self.first, self.last = Layer(), Layer()
            self.gain = nn.Parameter(torch.randn(6))
            weight = (self.first if own else self.last).linear.weight
            self.first.linear.forward = functools.partial(F.linear, weight=weight)
            gain = self.gain
            self.handle = self.last.register_forward_hook(lambda module, args, output: output * gain)

        def units(self) -> list[nn.Module]:
            return [self.first]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    @pytest.mark.parametrize("option", [True, False])
    def test_they_lead_to_the_new_parameters(self, option, slots):
        model = Model(seeded(self.Referring, True), numbers(6))
        assert_same_training(model, slots, reshard_after_forward=option)

    def test_the_old_ones_are_freed(self, slots, root):
        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(6, 6)
                self.weights = [*self.lstm.parameters()]

            def forward(self, x: Tensor) -> Tensor:
                return self.lstm(x)[0]

        model = Plain().to(root)
        old = [weakref.ref(parameter) for parameter in model.parameters()]
        fully_shard(model.lstm, devices=slots)
        outer = fully_shard(nn.Sequential(model, nn.Linear(1, 1).to(root)), devices=slots)
        gc.collect()
        assert [reference() for reference in old] == [None] * len(old)
        now = [*map(id, outer[0].lstm.parameters())]
        assert [*map(id, model.lstm._flat_weights)] == [*map(id, model.weights)] == now

    def test_handles_still_remove_their_hooks(self, slots, root):
        model = on_device(seeded(self.Referring, True), root)
        sharded(model, slots)
        model.handle.remove()
        assert not model.last._forward_hooks

    def test_those_to_another_unit_raise(self, slots, root, x):
        """The other unit need not be there. To read what is not there would crash the process."""
        model = on_device(seeded(self.Referring, False), root)
        model.units = lambda: [model.first, model.last]
        sharded(model, slots)
        with pytest.raises(TypeError, match=r"use full_tensor\(\)"):
            model(x)
        assert isinstance(model.last.linear.weight, ShardedTensor)

    def test_those_to_a_unit_around_are_full(self, slots):
        """The root is full while its children run."""
        assert_same_training(Model(seeded(self.Referring, False), numbers(6)), slots)


class TestChangesOfTheModel:
    @pytest.fixture(params=[0, 1], ids=["before the first call", "after it"])
    def replaced(self, request, slots, pair, x):
        """The pair with a new layer in place of the first."""
        for model in pair:
            for _ in range(request.param):
                mean_square_loss(model(x)).backward()
                model.zero_grad()
            model.layers[0] = on_device(seeded(lambda: Chain(Layer(), Layer()).layers[1]), slots[0])
        return pair

    def test_a_frozen_layer_replaces_one(self, replaced, x):
        """The new layer computes, with parameters of its own that are not sharded."""
        several, one = replaced
        for model in replaced:
            model.layers[0].requires_grad_(False)
            mean_square_loss(model(x)).backward()
        assert_equal(whole(several(x)), whole(one(x)), "output", atol=1e-9)
        for found, expected in zip(several.layers[1:].parameters(), one.layers[1:].parameters(), strict=True):
            assert_equal(whole(found.grad), whole(expected.grad), "gradient", atol=1e-9)

    def test_a_layer_that_needs_gradients_is_refused(self, replaced, x):
        """Nobody would sum them."""
        several, one = replaced
        with pytest.raises(RuntimeError, match=r"'layers.0.linear.weight' needs a gradient and is not sharded"):
            several(x)
        with torch.no_grad():
            assert_equal(whole(several(x)), whole(one(x)), "output", atol=1e-9)

    def test_a_buffer_that_needs_a_gradient_is_refused_by_name(self, slots, root):
        model = nn.Sequential(nn.BatchNorm1d(4)).to(root)
        model[0].register_buffer("scale", torch.ones(4, device=root, requires_grad=True))
        fully_shard(model, devices=slots)
        with pytest.raises(RuntimeError, match=r"the buffer '0.scale' needs a gradient.*Make it a parameter"):
            model(torch.ones(6, 4, device=root))

    @pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
    def test_a_transform_around_a_unit_is_refused_by_name(self, transform, slots, root):
        class Transformed(nn.Module):
            def __init__(self):
                super().__init__()
                self.unit = nn.Linear(4, 4)

            def forward(self, x):
                run = {
                    "vmap": lambda: torch.func.vmap(self.unit)(x),
                    "grad": lambda: torch.func.grad(lambda t: self.unit(t).sum())(x),
                    "jvp": lambda: torch.func.jvp(self.unit, (x,), (x,))[1],
                }
                return run[transform]()

        model = Transformed().to(root)
        fully_shard(model.unit, devices=slots)
        fully_shard(model, devices=slots)
        with pytest.raises(RuntimeError, match=r"transform .* runs around the unit 'unit'.*Make one unit"):
            model(torch.ones(6, 4, device=root))

    @pytest.mark.parametrize("child", [True, False])
    def test_frozen_between_forward_and_backward(self, child, pair, x):
        """A parameter gets no gradient then. One that is full says what to do."""
        several, one = pair
        for model in pair:
            loss = mean_square_loss(model(x))
            weight = model.layers[1].linear.weight if child else next(model.parameters())
            try:
                weight.requires_grad_(False)
            except RuntimeError as error:
                assert model is several
                assert "after backward() or after reshard()" in str(error)  # noqa: PT017
                several.reshard()
                next(several.parameters()).requires_grad_(False)
            loss.backward()
        assert_equal(gradients(several), gradients(one), "gradients", atol=1e-9)

    def test_frozen_before_a_second_call(self, pair, x):
        """Its graph has other parameters, so a backward through the first one says what to do."""
        several, _ = pair
        loss = mean_square_loss(several(x))
        several.layers[1].linear.weight.requires_grad_(False)
        mean_square_loss(several(x)).backward()
        with pytest.raises(RuntimeError, match=r"requires_grad or dtype was changed. Call backward\(\) before that"):
            loss.backward()

    def test_frozen_while_gradients_wait(self, slots, pair, x):
        several, one = pair
        with several.no_sync():
            mean_square_loss(several(x)).backward()
        mean_square_loss(one(x)).backward()
        weight = several.layers[1].linear.weight
        weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"'layers.1' were replaced, or .* while gradients wait on the slots"):
            several(x)
        weight.requires_grad_(True)
        for model in pair:
            mean_square_loss(model(x)).backward()
        assert_equal(gradients(several), gradients(one), "gradients", atol=1e-9)
