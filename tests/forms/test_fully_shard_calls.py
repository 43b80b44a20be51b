"""Calls, backwards, checkpoints, modes and hooks of a sharded model do what they do on one device."""

import gc
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from at_once import in_threads
from dataparallel.composable import CPUOffloadPolicy, fully_shard, replicate
from dataparallel.sharded import ShardedTensor
from dataparallel.sharded.units.calls import ModuleCall
from dataparallel.testing.cases import adamw, numbers, seeded, sgd
from dataparallel.testing.steps import assert_equal, mean_square_loss
from freed_later import freed_later
from sharded_chains import PLAIN, Chain, Layer, assert_same_results, chain, forward_backward
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
    whole,
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


class TestHooks:
    """They run as on one device. Hooks on units and below them run once for each slot, on its chunk."""

    PLACES: ClassVar = {
        "the model": lambda model: model,
        "a unit": lambda model: model.layers[1],
        "a layer of a unit": lambda model: model.layers[1].linear,
        "a layer of the model": lambda model: model.layers[0].linear,
    }

    HOOKS: ClassVar = {
        "forward pre": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        "forward pre with keywords": lambda m: m.register_forward_pre_hook(
            lambda module, args, kwargs: ((args[0].sin(),), kwargs), with_kwargs=True
        ),
        "forward": lambda m: m.register_forward_hook(lambda module, args, output: output * 3 + args[0].sum(1)[:, None]),
        "forward, always": lambda m: m.register_forward_hook(lambda module, args, y: y.exp(), always_call=True),
        "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,)),
        "full backward": lambda m: m.register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] + outputs[0],)
        ),
    }

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("kind", HOOKS)
    def test_what_they_return_counts(self, kind, place, slots, pair, x):
        for model in pair:
            self.HOOKS[kind](self.PLACES[place](model))

        def use(model):
            return [forward_backward(model, x) for _ in range(2)]

        assert_same_results(pair, use)

    @pytest.mark.parametrize("place", ["a unit", "a layer of a unit"])
    def test_they_may_compute_with_the_weights(self, place, slots, pair, x):
        def before(module, args):
            return (F.linear(args[0], module.get_parameter(name)),)

        def after(module, args, output):
            return F.linear(output, module.get_parameter(name))

        name = "linear.weight" if place == "a unit" else "weight"
        for model in pair:
            self.PLACES[place](model).register_forward_pre_hook(before)
            self.PLACES[place](model).register_forward_hook(after)
        assert_same_results(pair, lambda model: forward_backward(model, x))

    def test_those_on_a_unit_see_each_chunk_once(self, slots, pair, x):
        several, _ = pair
        seen: dict[str, list[int]] = {"before": [], "after": [], "back": []}
        unit = several.layers[1]
        unit.register_forward_pre_hook(lambda module, args: seen["before"].append(len(args[0])))
        unit.register_forward_hook(lambda module, args, output: seen["after"].append(len(output)))
        unit.register_full_backward_hook(lambda module, inputs, outputs: seen["back"].append(len(inputs[0])))
        forward_backward(several, x)
        chunks = sorted(len(chunk) for chunk in x.chunk(len(slots)))
        assert {name: sorted(rows) for name, rows in seen.items()} == dict.fromkeys(seen, chunks)

    @several_loops
    def test_tensor_hooks_on_the_input_of_a_unit(self, loop, slots):
        def doubled(y: Tensor) -> Tensor:
            y.register_hook(lambda gradient: gradient * 2)
            return y

        assert_same_training(chain(Layer, lambda: Layer(before=doubled), Layer), slots, loop=LOOPS[loop])

    def test_tensor_hooks_on_the_input_and_the_output_of_the_model(self, slots, pair, x):
        def use(model):
            leaf = x.clone().requires_grad_()
            leaf.register_hook(lambda gradient: gradient * 3)
            output = model(leaf)
            output.register_hook(lambda gradient: gradient.sin())
            output.retain_grad()
            mean_square_loss(output).backward()
            return [leaf.grad, output.grad]

        assert_same_results(pair, use)

    def test_hooks_on_sharded_parameters_run_after_their_gradient_is_summed(self, slots, pair, x):
        seen: list[dict[str, Any]] = [{}, {}]
        for model, found in zip(pair, seen, strict=True):
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, name=name, found=found: found.update({name: whole(parameter.grad)})
                )
            forward_backward(model, x)
        found, expected = (dict(sorted(each.items())) for each in seen)
        assert_equal(found, expected, "gradients", atol=1e-9)
        assert len(found) == len([*pair[0].parameters()])


def with_hooks(*hooks: Callable[[Tensor], Tensor | None]) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    """AdamW over parameters that get these hooks first."""

    def made(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        kept = [*parameters]
        for parameter, hook in product(kept, hooks):
            if parameter.requires_grad:
                parameter.register_hook(hook)
        return adamw(kept)

    return made


def rows_masked(gradient: Tensor) -> Tensor:
    """Without every third row. The mask is a plain tensor, as users have it."""
    if not gradient.dim():
        return gradient
    rows = torch.arange(gradient.shape[0], device=gradient.device).view(-1, *[1] * (gradient.dim() - 1))
    return gradient * (rows % 3 > 0)


def clamped(gradient: Tensor) -> Tensor:
    """It matters whether this gets the whole sum of a pass, or sums one by one."""
    return gradient.clamp(-1e-2, 1e-2)


class TestHooksOnParameters:
    """They get the sharded gradient of a pass, once, and what they return is accumulated: as on one device."""

    @pytest.mark.parametrize("name", ["gpt", "gpt, checkpoints around units", "unused and repeated units"])
    def test_what_they_return_is_accumulated(self, name, slots):
        assert_same_training(MODELS[name], slots, optimizer=with_hooks(clamped, rows_masked))

    def test_come_before_those_after_accumulation_and_not_without_a_gradient(self, slots, pair, x):
        several, _ = pair
        called: list[str] = []
        for name, parameter in several.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: called.append(f"{name} accumulated"))
            parameter.register_hook(lambda gradient, name=name: called.append(name))
            parameter.requires_grad_(not name.startswith("layers.1"))
        forward_backward(several, x)
        expected = [name for name, parameter in several.named_parameters() if parameter.requires_grad]
        assert sorted(called) == sorted([*expected, *(f"{name} accumulated" for name in expected)])
        assert all(called.index(name) < called.index(f"{name} accumulated") for name in expected)

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


class Taking(nn.Module):
    """A unit that takes a parameter of its parent, in one of these ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.scale, self.inner = way, nn.Parameter(torch.ones(5, 6)), Inner()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, self.scale[:3] if self.way == "view" else self.scale)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale.to(x.device).sum(0)  # an ignored one is on the first slot


@freed_later
@pytest.mark.parametrize("way", ["parameter", "view", "ignored", "leaf"])
def test_no_hooks_pile_up_on_inputs_that_stay(way, slots, root):
    """A parameter of another unit, or a leaf of the user, outlives the calls that take it."""
    model = Taking(way).to(root)
    fully_shard(model.inner, devices=slots[:1] if way == "leaf" else slots)
    ignored = {model.scale} if way == "ignored" else None
    fully_shard(model, devices=slots[:1] if way == "leaf" else slots, ignored_params=ignored)
    x = torch.ones(6, 6, device=root, requires_grad=way == "leaf")

    def hooks() -> int:
        model(x).sum().backward()
        gc.collect()
        return sum(isinstance(each, ModuleCall) for each in gc.get_objects())

    before = hooks()
    assert [hooks() for _ in range(3)] == [before] * 3
    assert not x._backward_hooks
