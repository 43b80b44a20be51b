"""Calls and backwards of a sharded model do what they do on one device, or say why not.

What users do between them is drawn by test_state_machine.
"""

import gc
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from at_once import in_threads
from dataparallel.composable import CPUOffloadPolicy, fully_shard, replicate
from dataparallel.sharded import ShardedTensor
from dataparallel.sharded.units.bindings import ModuleCall
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import assert_equal, mean_square_loss
from freed_later import freed_later
from sharded_chains import PLAIN, Chain, Layer, assert_same_results, forward_backward
from sharded_models import GPT
from sharded_steps import (
    MODELS,
    Model,
    assert_same_training,
    batches_of,
    gradients,
    on_device,
    sharded,
    whole,
)


def test_keyword_arguments_and_no_arguments_of_units(slots):
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(6))

        def forward(self, *, factor: Tensor | None = None) -> Tensor:
            return self.rows.exp() if factor is None else self.rows * factor

    class Caller(Chain):
        def forward(self, x: Tensor) -> Tensor:
            first, table, other = self.layers
            return other(factor=first(x)) * table()

    assert_same_training(Model(seeded(lambda: Caller(Layer(), Table(), Table())), numbers(6)), slots)


def test_a_call_that_ends_beside_another_leaves_the_sharded_parameters_to_those_that_begin(slots, root):
    """The full ones of a call that runs are freed at its end: a call that found them in the module would crash."""
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, waits=False):
            y = self.linear(x)
            if waits:
                inside.set()
                assert go_on.wait(20)
            return y

    model, x = fully_shard(Waits().to(root), devices=slots), torch.ones(len(slots), 4, device=root)

    @torch.no_grad()
    def call(index, barrier):
        if index == 0:
            model(x, waits=True)
            return
        assert inside.wait(20)
        model(x)
        try:
            assert all(isinstance(parameter, ShardedTensor) for parameter in model.parameters())
        finally:
            go_on.set()

    in_threads(2, call)


class AsksItsWeights(nn.Module):
    """Makes tensors where its first parameter is, which belongs to a layer, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def units(self) -> list[nn.Module]:
        return [*self.layers]

    def shifted(self, x: Tensor) -> Tensor:
        return self.layers[1](x + torch.arange(6, device=next(self.parameters()).device))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.shifted, self.layers[0](x), use_reentrant=False).to(next(self.parameters()).device)


@pytest.mark.parametrize("offload", [False, True])
def test_the_device_of_a_parameter_is_that_of_the_replica_that_asks(offload, slots):
    def afterwards(model: nn.Module) -> None:
        assert next(model.parameters()).device == torch.device("cpu" if offload else slots[0])

    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    model = Model(seeded(AsksItsWeights), numbers(6))
    assert_same_training(model, slots, steps=2, afterwards=afterwards, **options)


def test_backward_inside_of_forward(slots):
    """Each replica attacks its own chunk."""

    class Attacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

        def units(self) -> list[nn.Module]:
            return [self.body, self.head]

        def predict(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

        def forward(self, x: Tensor) -> Tensor:
            change = torch.zeros_like(x)
            for _ in range(3):
                change = change.detach().requires_grad_()
                self.predict(x + change).square().sum().backward()
                change = change + 0.1 * change.grad.sign()
            return self.predict(x + change.detach())

    assert_same_training(Model(seeded(Attacked), numbers(6)), slots, steps=2)


@pytest.fixture
def full_pair(slots, root):
    """A chain whose units stay full after forward, and its twin on one device."""
    several = sharded(on_device(PLAIN.build, root), slots, reshard_after_forward=False)
    return several, on_device(PLAIN.build, root)


class TestBackward:
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

    def test_a_graph_of_the_gradients_of_parameters_is_refused(self, slots, pair, x):
        several, _ = pair
        with pytest.raises(RuntimeError, match="create_graph"):
            mean_square_loss(several(x)).backward(create_graph=True)
        several.zero_grad()
        assert_same_results(pair, lambda model: forward_backward(model, x))


def test_autocast(slots, root):
    """Slots compute in the lower dtype as those of `replicate` do, also what they recompute."""

    def build() -> nn.Module:
        return seeded(GPT, "around")().float()

    several, other = sharded(on_device(build, root), slots), replicate(on_device(build, root), devices=slots)
    (tokens,), _ = next(batches_of(MODELS["gpt"], slots))
    for model in (several, other):
        with torch.autocast(root.type, dtype=torch.bfloat16):
            output = model(tokens)
        assert output.dtype is torch.bfloat16
        mean_square_loss(output).backward()
    assert_equal(gradients(several), gradients(other), "gradients", atol=1e-5)


class TestHooksOnParameters:
    """They get the sharded gradient of a pass, once, and what they return is accumulated: as on one device."""

    def test_those_from_before_fully_shard_stay_and_their_handles_remove_them(self, slots, root):
        model, called = nn.Linear(6, 5).to(root), []
        handle = model.weight.register_hook(lambda gradient: called.append(type(gradient)))
        after = model.bias.register_post_accumulate_grad_hook(lambda bias: called.append(type(bias.grad)))
        fully_shard(model, devices=slots)
        for _ in range(2):
            model(torch.ones(4, 6, device=root)).sum().backward()
            handle.remove()
            after.remove()
        assert called == [ShardedTensor, ShardedTensor]

    @pytest.mark.parametrize(
        ("returned", "error"),
        [
            (lambda gradient: 0, "returned int"),
            (lambda gradient: gradient.sum(0), r"shape \(6, 6\).*returned one of shape \(6,\)"),
            (lambda gradient: gradient.float(), "float64.*returned .*float32"),
        ],
        ids=["no tensor", "another shape", "another dtype"],
    )
    def test_a_wrong_result_is_refused_and_changes_no_gradient(self, returned, error, slots, pair, x):
        weight = pair[0].layers[1].linear.weight
        forward_backward(pair[0], x)
        before = whole(weight.grad)
        handle = weight.register_hook(lambda gradient: returned(whole(gradient)))
        with pytest.raises((TypeError, ValueError), match=error):
            forward_backward(pair[0], x)
        assert torch.equal(whole(weight.grad), before)
        handle.remove()
        pair[0].zero_grad()
        assert_same_results(pair, lambda model: forward_backward(model, x))


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale.sum(0)


class Gives(nn.Module):
    """Its unit takes a parameter of the model, or a view of it."""

    def __init__(self, is_view: bool) -> None:
        super().__init__()
        self.is_view, self.scale, self.inner = is_view, nn.Parameter(torch.ones(5, 6)), Scales()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.scale[:3] if self.is_view else self.scale)


@freed_later
@pytest.mark.slots(1, 3)
@pytest.mark.parametrize("is_view", [False, True])
def test_no_hooks_pile_up_on_inputs_that_stay(is_view, slots, root):
    """A parameter of another unit, or a leaf of the user, outlives the calls that take it."""
    model = Gives(is_view).to(root)
    fully_shard(model.inner, devices=slots)
    fully_shard(model, devices=slots)
    x = torch.ones(6, 6, device=root, requires_grad=True)

    def hooks() -> int:
        model(x).sum().backward()
        gc.collect()
        return sum(isinstance(each, ModuleCall) for each in gc.get_objects())

    before = hooks()
    assert [hooks() for _ in range(3)] == [before] * 3
    assert not x._backward_hooks
