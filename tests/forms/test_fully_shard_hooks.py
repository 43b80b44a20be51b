"""Hooks on a sharded model, on its units and below them run as on one device, in float64 to 1e-9."""

import gc
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from dataparallel.sharded import ShardedTensor
from dataparallel.sharded.units.calls import ModuleCall
from dataparallel.testing.cases import adamw
from dataparallel.testing.steps import assert_equal, mean_square_loss
from freed_later import freed_later
from sharded_chains import Layer, assert_same_results, chain, forward_backward
from sharded_steps import (
    LOOPS,
    MODELS,
    assert_same_training,
    several_loops,
    whole,
)


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
