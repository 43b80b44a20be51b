"""What goes into units and comes out of them, and calls of units and their layers from outside."""

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from at_once import in_threads
from dataparallel.composable import CPUOffloadPolicy, fully_shard
from dataparallel.sharded import ShardedTensor
from dataparallel.testing.cases import numbers, seeded
from sharded_chains import PLAIN, Chain, Layer, assert_same_results, chain, forward_backward
from sharded_steps import (
    LOOPS,
    Model,
    assert_all_sharded,
    assert_same,
    assert_same_training,
    batches_of,
    on_device,
    several_loops,
    sharded,
    train,
)


class TestUnits:
    """What goes into a unit and what comes out of it."""

    @dataclass
    class Pair:
        left: Tensor
        right: Tensor

    OUTPUTS: ClassVar = {
        "a tuple": (lambda y: (y, y.square()), lambda y: y[0] + y[1]),
        "a dict": (lambda y: {"a": y, "b": {"c": [y.sin(), None, "text"]}}, lambda y: y["a"] * y["b"]["c"][0]),
        "a dataclass": (lambda y: TestUnits.Pair(y, y.cos()), lambda y: y.left - y.right),
        "views": (lambda y: y.chunk(2, dim=1), lambda y: torch.cat([y[1], y[0]], dim=1)),
        "a view": (lambda y: y.t(), lambda y: y.t()),
        "views, one unused": (lambda y: y.unbind(1), lambda y: torch.stack([y[0], *y[:5]], dim=1)),
        "the input too": (lambda y: (y, y.detach()), lambda y: y[0] * y[1]),
        "one without a graph": (lambda y: (y.detach(), y), lambda y: y[1] + y[0]),
    }

    @pytest.mark.parametrize("loop", LOOPS)
    @pytest.mark.parametrize("kind", OUTPUTS)
    def test_outputs_are_of_any_kind(self, kind, loop, slots):
        after, before = self.OUTPUTS[kind]
        model = chain(Layer, lambda: Layer(after), lambda: Layer(after, before), lambda: Layer(before=before))
        assert_same_training(model, slots, loop=LOOPS[loop], steps=2)

    def test_outputs_that_take_no_gradient_at_all(self, slots):
        model = chain(Layer, lambda: Layer(torch.detach), Layer)
        assert_same_training(model, slots)

    @pytest.mark.parametrize("loop", LOOPS)
    def test_the_first_operator_works_in_place(self, loop, slots):
        model = chain(*[lambda: Layer(lambda y: y * 1.5, torch.relu_)] * 3)

        def batch(size: int, seed: int):
            (x,), _ = numbers(6)(size, seed)
            return (x,), {}

        assert_same_training(Model(model.build, batch), slots, loop=LOOPS[loop], steps=2)

    def test_the_output_is_changed_in_place_by_the_caller(self, slots):
        model = chain(*[lambda: Layer(lambda y: y * 1.5, lambda y: y.mul_(2).add_(1))] * 3)
        assert_same_training(model, slots)

    def test_keyword_arguments_and_no_tensor_arguments(self, slots):
        class Named(Layer):
            def forward(self, *, y: Tensor, factor: float = 1.0, none: None = None) -> Tensor:
                return super().forward(y) * factor

        class Table(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rows = nn.Parameter(torch.randn(6))

            def forward(self) -> Tensor:
                return self.rows.exp()

        class Caller(Chain):
            def forward(self, x: Tensor) -> Tensor:
                first, second, table = self.layers
                return second(y=first(x), factor=2.0) * table()

        assert_same_training(Model(seeded(lambda: Caller(Layer(), Named(), Table())), numbers(6)), slots)

    def test_a_unit_below_a_unit_is_called_several_times_by_it(self, slots):
        class Outer(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Layer()

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(super().forward(self.inner(self.inner(x))))

        class Deep(Chain):
            def units(self) -> list[Any]:
                return [layer.inner for layer in self.layers] + super().units()

        assert_same_training(Model(seeded(lambda: Deep(Outer(), Outer(), Outer())), numbers(6)), slots)


class TestCallsFromOutside:
    def test_a_layer_of_a_unit_says_what_to_do(self, slots, pair, x):
        """Its weights are sharded, and nobody has gathered them."""
        several, _ = pair
        with pytest.raises(TypeError, match=r"full_tensor\(\)"):
            several.layers[1].linear(x)
        assert_all_sharded(several)
        assert_same_results(pair, lambda model: forward_backward(model, x))


class TestSeveralModels:
    @several_loops
    def test_a_sharded_part_of_a_plain_model(self, loop, slots, root):
        """Its optimizer has plain parameters and sharded ones."""

        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(6, 6), PLAIN.build(), nn.Tanh(), nn.Linear(6, 2))

        both = []
        for is_sharded in (True, False):
            model = on_device(seeded(build), root)
            if is_sharded:
                sharded(model[1], slots)
                model.no_sync = model[1].no_sync
            both.append(train(model, batches_of(PLAIN, slots), loop=LOOPS[loop]))
        assert_same(*both)


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

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.checkpointed = checkpointed

    def units(self) -> list[nn.Module]:
        return [*self.layers]

    def shifted(self, x: Tensor) -> Tensor:
        return self.layers[1](x + torch.arange(6, device=next(self.parameters()).device))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.full((6,), 2.0, dtype=x.dtype, device=next(self.parameters()).device)
        x = self.layers[0](x)
        x = checkpoint(self.shifted, x, use_reentrant=False) if self.checkpointed else self.shifted(x)
        return self.layers[2](x).to(next(self.parameters()).device)[:, :4]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_device_of_a_parameter_is_that_of_the_replica_that_asks(checkpointed, offload, slots):
    def afterwards(model: nn.Module) -> None:
        assert next(model.parameters()).device == torch.device("cpu" if offload else slots[0])

    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    model = Model(seeded(AsksItsWeights, checkpointed), numbers(6))
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
