"""Checkpoints, backwards and modes of torch: a sharded model does what one device does, in float64 to 1e-9."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.composable import replicate
from dataparallel.sharded import ShardedTensor
from dataparallel.testing.cases import numbers, seeded, sgd
from dataparallel.testing.steps import mean_square_loss
from sharded_chains import PLAIN, Layer, assert_same_results, chain, forward_backward
from sharded_models import GPT
from sharded_steps import (
    LOOPS,
    MODELS,
    Model,
    assert_all_sharded,
    assert_same,
    assert_same_training,
    batches_of,
    forward,
    on_device,
    several_loops,
    sharded,
    train,
)

both_kinds = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])


@pytest.fixture
def full_pair(slots, root):
    """A chain whose units stay full after forward, and its twin on one device."""
    several = sharded(on_device(PLAIN.build, root), slots, reshard_after_forward=False)
    return several, on_device(PLAIN.build, root)


class Recomputed:
    """A model that a checkpoint is around when it is called."""

    def __init__(self, model: nn.Module, use_reentrant: bool) -> None:
        self.model, self.use_reentrant = model, use_reentrant

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.model, *args, use_reentrant=self.use_reentrant, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class TestCheckpoints:
    @pytest.mark.slots(3, long=[2, 8])
    @several_loops
    @both_kinds
    def test_around_the_whole_model(self, use_reentrant, loop, slots, root):
        def step(model, take, loss):
            return LOOPS[loop](Recomputed(model, use_reentrant), take, loss)

        # A reentrant checkpoint wants an input that takes a gradient.
        def batch(size: int, seed: int):
            (x,), _ = numbers(6)(size, seed)
            return (x.requires_grad_(),), {}

        assert_same_training(Model(PLAIN.build, batch), slots, loop=step)


class TestBackward:
    @pytest.mark.parametrize("change", ["step", "step, foreach", "one weight", "load_state_dict"])
    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    def test_weights_that_changed_since_the_forward(self, change, reshard_after_forward, slots, root, x):
        pair = (
            sharded(on_device(PLAIN.build, root), slots, reshard_after_forward=reshard_after_forward),
            on_device(PLAIN.build, root),
        )
        for model in pair:
            forward_backward(model, x)
            # On one simulated device torch does not see what its foreach operators write.
            foreach = change == "step, foreach" and model is pair[0]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
            saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
            loss = mean_square_loss(model(x.clone().requires_grad_()))
            if change.startswith("step"):
                optimizer.step()
            elif change == "one weight":
                with torch.no_grad():
                    model.layers[1].linear.weight.mul_(2)
            else:
                model.load_state_dict(saved)
            with pytest.raises(RuntimeError, match=r"modified|changed"):
                loss.backward()
            model.zero_grad()
        assert_same_results(pair, lambda model: forward_backward(model, x))

    @pytest.mark.parametrize("name", ["weight", "bias"])
    @pytest.mark.parametrize("then", ["backward", "call", "backward of another call", "reshard", "unshard", "to"])
    def test_full_weights_are_copies_and_a_change_of_them_raises(self, then, name, full_pair, x):
        """The change would be lost. Backward reads the weight and not the bias."""
        several = full_pair[0]
        other = mean_square_loss(several(x.cos())) if then == "backward of another call" else None
        loss = mean_square_loss(several(x))
        several.layers[1].unshard()
        full = getattr(several.layers[1].linear, name)
        assert not isinstance(full, ShardedTensor)
        with torch.no_grad():
            full.mul_(2)
        steps = {
            "backward": loss.backward,
            "call": lambda: several(x),
            "backward of another call": other and other.backward,
            "reshard": several.layers[1].reshard,
            "unshard": several.layers[1].unshard,
            "to": several.float,
        }
        with pytest.raises(RuntimeError, match=rf"'{name}' in the unit 'layers\.1' was changed in place"):
            steps[then]()
        several.zero_grad()
        assert_same_results(full_pair, lambda model: forward_backward(model, x))

    def test_a_unit_that_changes_its_weights_in_forward_raises(self, slots, root, x):
        class Normalised(Layer):
            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    self.linear.weight.div_(self.linear.weight.norm())
                return super().forward(x)

        several = sharded(on_device(chain(Layer, Normalised).build, root), slots)
        with pytest.raises(RuntimeError, match=r"'weight' in the unit 'layers\.1' was changed in place"):
            several(x)
        assert_all_sharded(several)

    def test_zeroed_gradients_stay_the_same_tensors(self, slots, pair, x):
        def use(model):
            forward_backward(model, x)
            before = [parameter.grad for parameter in model.parameters()]
            model.zero_grad(set_to_none=False)
            forward_backward(model, x.cos())
            assert all(parameter.grad is held for parameter, held in zip(model.parameters(), before, strict=True))

        assert_same_results(pair, use)

    def test_gradients_of_sharded_parameters_are_not_returned(self, slots, pair, x):
        """Gradients of parameters come from ``backward()``, perhaps with ``inputs=``."""
        several, _ = pair
        with pytest.raises(RuntimeError, match=r"loss.backward\(inputs=\[...\]\)"):
            torch.autograd.grad(mean_square_loss(several(x)), [*several.parameters()])
        assert_same_results(pair, lambda model: forward_backward(model, x))

    def test_a_graph_of_the_gradients_of_parameters_is_refused(self, slots, pair, x):
        several, _ = pair
        with pytest.raises(RuntimeError, match="create_graph"):
            mean_square_loss(several(x)).backward(create_graph=True)
        several.zero_grad()
        assert_same_results(pair, lambda model: forward_backward(model, x))


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

    def test_part_of_the_output_is_used(self, slots, pair, x):
        """Some slots have no backward at all."""

        def use(model):
            model(x)[:1].square().sum().backward()

        assert_same_results(pair, use)
