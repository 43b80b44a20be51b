"""Between calls other code finds the sharded parameters always, and what it writes reaches the next call."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from at_once import in_threads
from dataparallel.composable import fully_shard
from dataparallel.testing.steps import assert_equal, mean_square_loss
from sharded_chains import PLAIN, assert_same_results, forward_backward
from sharded_steps import assert_all_sharded, gradients, on_device, sharded, whole

pytestmark = pytest.mark.slots(4, long=[2])

Pair = tuple[Any, Any]
Write = Callable[[Any, Any], Any]
"""Writes new values to a parameter. Both are sharded in the same way."""


SEEN: dict[str, Write] = {
    "copy_": lambda parameter, new: parameter.detach().copy_(new),
    "copies on lists, into data": lambda parameter, new: torch._foreach_copy_([parameter.data], [new]),
    "copies on lists, into shards": lambda parameter, new: torch._foreach_copy_([*parameter.shards], [*new.shards]),
}


def pair_with(slots: list, **options: Any) -> Pair:
    one = on_device(PLAIN.build, slots[0])
    return sharded(on_device(PLAIN.build, slots[0]), slots, **options), one


def assert_alike(pair: Pair, x: Tensor) -> None:
    for model in pair:
        model.zero_grad()
    assert_same_results(pair, lambda model: forward_backward(model, x))


class TestWritesBetweenForwardAndBackward:
    @pytest.mark.parametrize("reshard", [True, False])
    @pytest.mark.parametrize("how", SEEN)
    def test_are_refused_wherever_the_values_are(self, how, reshard, slots, x):
        pair = pair_with(slots, reshard_after_forward=reshard)
        loss = mean_square_loss(pair[0](x))
        for parameter, plain in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            SEEN[how](parameter, parameter.detach() * 0.5)
            plain.data.mul_(0.5)
        with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
            loss.backward()
        pair[0].zero_grad()
        assert_alike(pair, x)

    @pytest.mark.parametrize("reshard", [True, False])
    def test_that_give_a_parameter_other_memory_leave_the_backward_its_values(self, reshard, slots, x):
        """As on one device, where the graph keeps the former memory."""
        pair = pair_with(slots, reshard_after_forward=reshard)
        for model in pair:
            loss = mean_square_loss(model(x))
            for parameter in model.parameters():
                parameter.data = parameter.data.clone().mul_(0.5)
            loss.backward()
        assert_equal(*(gradients(model) for model in pair), "gradients", atol=1e-9)
        assert_alike(pair, x)


class TestPartsThatAreCalledOutsideOfTheirUnit:
    def test_the_message_names_the_unit_and_its_advice_works(self, slots, root):
        def build() -> nn.Sequential:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double().to(root)

        x = torch.ones(6, 4, dtype=torch.float64, device=root)
        model = fully_shard(build(), devices=slots)
        with pytest.raises(
            NotImplementedError, match=r"whole only while its unit runs.*give fully_shard this one too, before"
        ):
            model[0](x)
        model = build()
        fully_shard(model[0], devices=slots)
        fully_shard(model, devices=slots)
        torch.testing.assert_close(model[0](x), build()[0](x))
        torch.testing.assert_close(model(x), build()(x))

    def test_weights_that_forward_changes(self, slots, root):
        index = torch.arange(6, device=root)
        model: Any = fully_shard(nn.Embedding(9, 4, max_norm=1.0).to(root), devices=slots)
        with pytest.raises(RuntimeError, match=r"An Embedding with max_norm does: leave max_norm out.*shard.renorm_"):
            model(index)
        model = fully_shard(nn.Embedding(9, 4).to(root), devices=slots)
        with torch.no_grad():
            for shard in model.weight.shards:
                shard.renorm_(2.0, 0, 1.0)
        assert model(index).norm(dim=1).max() <= 1 + 1e-6


class TestUnshard:
    def test_ends_with_a_backward_that_leaves_units_full(self, slots, x):
        """So `clip_grad_norm_` sees the gradients, which are those of the sharded parameters."""
        pair = pair_with(slots)
        several, _ = pair
        several.set_reshard_after_backward(False)
        several.unshard()  # its forward leaves the outermost unit full
        norms = []
        for model in pair:
            mean_square_loss(model(x)).backward()
            norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))
        assert_all_sharded(several)
        assert_equal(*norms, "norms", atol=1e-9)
        assert_equal(gradients(several), gradients(pair[1]), "gradients", atol=1e-9)


def test_the_first_calls_after_a_change_may_come_from_several_threads(slots, x):
    """The units adapt to it once."""
    for _ in range(8):
        model, one = pair_with(slots)
        for each in (model, one):
            forward_backward(each, x)
            next(each.parameters()).requires_grad_(False)
            each.zero_grad()

        def step(index: int, barrier: threading.Barrier, model: Any = model) -> None:
            barrier.wait()
            forward_backward(model, x)

        in_threads(2, step)
        for _ in range(2):
            forward_backward(one, x)
        assert_equal(gradients(model), gradients(one), "gradients", atol=1e-9)
