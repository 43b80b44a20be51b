"""Modes of torch and graphs that are no plain backward: a sharded model does what one device does."""

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import replicate
from dataparallel.testing.cases import seeded, sgd
from dataparallel.testing.steps import mean_square_loss
from sharded_chains import assert_same_results, forward_backward
from sharded_models import GPT
from sharded_steps import (
    MODELS,
    assert_same,
    batches_of,
    forward,
    on_device,
    sharded,
    train,
)

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class TestModes:
    def test_eval_then_train(self, slots, root):
        """Dropout and batch statistics follow the mode at each call."""
        several, one = (on_device(MODELS["resnet"].build, root) for _ in range(2))
        sharded(several, slots)
        replicate(one, devices=slots)
        found = []
        for model in (several, one):
            for number, training in enumerate([True, False, True, True, False]):
                model.train(training)
                found.append(train(model, batches_of(MODELS["resnet"], slots, number), sgd, 1))
        for ours, theirs in zip(found[:5], found[5:], strict=True):
            assert_same(ours, theirs)

    @pytest.mark.slots(3)
    def test_autocast(self, slots, root):
        """Slots compute in the lower dtype as those of `replicate` do, with the same chunks."""

        def build() -> nn.Module:
            return seeded(GPT, "around")().float()

        def loss(output: Tensor) -> Tensor:
            assert output.dtype is torch.bfloat16
            return mean_square_loss(output)

        several, other = on_device(build, root), on_device(build, root)
        sharded(several, slots)
        replicate(other, devices=slots)
        found = []
        for model in (several, other):

            def step(model, take, loss):
                with torch.autocast(root.type, dtype=torch.bfloat16):
                    value = forward(model, take, loss)
                value.backward()
                return [value]

            found.append(train(model, batches_of(MODELS["gpt"], slots), sgd, 2, loop=step, loss=loss))
        assert_same(*found, atol=1e-5)
        assert {*map(type, found[0].gradients[0].values())} == {Tensor}
        assert {gradient.dtype for gradient in found[0].gradients[0].values()} == {torch.float32}

    def test_a_gradient_penalty(self, slots, pair, x):
        def use(model):
            leaf = x.clone().requires_grad_()
            loss = mean_square_loss(model(leaf))
            (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
            (loss + gradient.square().sum()).backward()
            return [loss, leaf.grad]

        assert_same_results(pair, use)
        assert_same_results(pair, lambda model: forward_backward(model, x))

    def test_the_gradient_of_the_input_alone_leaves_none_on_parameters(self, slots, pair, x):
        def use(model):
            leaf = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(mean_square_loss(model(leaf)), leaf)
            return gradient

        assert_same_results(pair, use)
        assert all(parameter.grad is None for model in pair for parameter in model.parameters())
        assert_same_results(pair, lambda model: forward_backward(model, x))

    def test_a_forward_whose_backward_never_comes(self, slots, pair, x):
        def use(model):
            abandoned = model(x)
            found = forward_backward(model, x.cos())
            del abandoned
            return [found, forward_backward(model, x)]

        assert_same_results(pair, use)

    def test_part_of_the_output_is_used(self, slots, pair, x):
        """Some slots have no backward at all."""

        def use(model):
            model(x)[:1].square().sum().backward()

        assert_same_results(pair, use)
