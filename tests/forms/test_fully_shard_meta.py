"""Where a sharded model's values come from and go to: meta, state dicts, other dtypes, another number of devices."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from dataparallel.testing.cases import adamw
from dataparallel.testing.steps import assert_equal
from sharded_models import Apart, on_meta
from sharded_steps import (
    MODELS,
    Model,
    assert_all_sharded,
    assert_same,
    batches_of,
    on_device,
    sharded,
    state,
    train,
    whole,
)

MODEL = MODELS["gpt"]
UNTIED = MODELS["gpt, units of several kinds"]


def blank(model: Model, root: torch.device) -> nn.Module:
    """The model with zeros, to be loaded."""
    made = on_device(model.build, root)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    return made


def initialise(model: nn.Module) -> None:
    """As user code does after `to_empty`."""
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def assert_trains_as(several: nn.Module, one: nn.Module, slots: list) -> None:
    assert_all_sharded(several)
    ours, theirs = (train(model, batches_of(MODEL, slots), steps=3) for model in (several, one))
    assert_same(ours, theirs)


class TestMeta:
    @pytest.mark.slots(3, long=[2, 8])
    def test_parameters_are_drawn_as_on_one_device(self, slots, root):
        several, one = sharded(on_meta(), slots), on_meta().to_empty(device=root)
        one.head.weight = one.embedding.weight
        for model in (several.to_empty(device=root.type), one):
            initialise(model)
        assert several.head.weight is several.embedding.weight
        assert_equal(state(several), state(one), "drawn", atol=0)
        assert_trains_as(several, one, slots)

    @pytest.mark.slots(3, long=[2, 8])
    def test_initialisations_that_write_to_rows_and_slices(self, slots, root):
        """A padding row as torch's and transformers' embeddings have it, and the forget gates of an LSTM."""

        class Rows(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words, self.places = nn.Embedding(11, 4, padding_idx=9), nn.Embedding(5, 4, padding_idx=-1)
                self.gates = nn.LSTM(4, 3)

            def forward(self, x: Tensor) -> Any:
                return self.gates(self.words(x) + self.places(x))

            def reset_parameters(self) -> None:
                self.words.reset_parameters()
                self.places.weight.data.normal_(std=0.02)
                self.places.weight.data[self.places.padding_idx].zero_()
                self.gates.reset_parameters()
                self.gates.bias_ih_l0.data[3:6].fill_(1.0)
                for gate in self.gates.weight_hh_l0.data.chunk(4):
                    nn.init.xavier_uniform_(gate)

        with torch.device("meta"):
            several, one = Rows(), Rows()
        fully_shard(several, devices=slots)
        for model in (several, one):
            model.to_empty(device=root)
            torch.manual_seed(3)
            model.reset_parameters()
        assert_equal(state(several), state(one), "state", atol=0)

    @pytest.mark.slots(3, long=[2, 8])
    def test_sharded_values_are_assigned_without_to_empty(self, slots, root):
        """As on one device, that unties weights: this model has none."""
        several, one = sharded(on_meta(Apart), slots), on_device(UNTIED.build, root)
        several.load_state_dict(sharded(on_device(UNTIED.build, root), slots).state_dict(), assign=True)
        assert_trains_as(several, one, slots)

    def test_a_call_before_they_have_values_says_so(self, slots, root):
        several = sharded(on_meta(), slots)
        (tokens,), _ = next(batches_of(MODEL, slots))
        with pytest.raises(RuntimeError, match=r"to_empty|meta"):
            several(tokens)


class TestStateDicts:
    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("map_location", [None, "cpu"])
    def test_a_sharded_one_goes_through_a_file(self, map_location, assign, slots, root):
        """Training goes on as if it had not been interrupted."""
        model = UNTIED if assign else MODEL
        several, one = sharded(on_device(model.build, root), slots), on_device(model.build, root)
        batches = [batches_of(model, slots) for _ in range(2)]
        optimizer, of_one = adamw(several.parameters()), adamw(one.parameters())
        train(several, batches[0], optimizer, 2)
        train(one, batches[1], of_one, 2)
        file = io.BytesIO()
        torch.save({"model": several.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True, map_location=map_location)
        again = sharded(blank(model, root), slots)
        if assign and map_location == "cpu":
            # What is assigned stays where it is, and a unit's shards are on its slots.
            saved["model"] = {name: value.to(root.type) for name, value in saved["model"].items()}
        again.load_state_dict(saved["model"], assign=assign)
        optimizer = adamw(again.parameters())
        optimizer.load_state_dict(saved["optimizer"])
        assert_all_sharded(again)
        assert_same(train(again, batches[0], optimizer, 3), train(one, batches[1], of_one, 3))

    @pytest.mark.parametrize("when", ["before the first call", "later"])
    @pytest.mark.parametrize("assign", [False, True])
    def test_weights_are_replaced(self, assign, when, slots, root):
        """A call after the load computes with the new weights."""
        model = UNTIED if assign else MODEL
        several, one = sharded(on_device(model.build, root), slots), on_device(model.build, root)
        if when == "later":
            for each in (several, one):
                train(each, batches_of(model, slots), steps=1)
        changed = sharded(on_device(model.build, root), slots)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.copy_(parameter.cos())
        several.load_state_dict(changed.state_dict(), assign=assign)
        one.load_state_dict(whole(changed.state_dict()))
        assert_trains_as(several, one, slots)


class TestConversions:
    def test_to_the_cpu_and_back(self, slots, root):
        several, one = sharded(on_device(MODEL.build, root), slots), on_device(MODEL.build, root)
        train(several, batches_of(MODEL, slots), steps=1)
        train(one, batches_of(MODEL, slots), steps=1)
        several.cpu()
        assert all(shard.device.type == "cpu" for parameter in several.parameters() for shard in parameter.shards)
        several.to(root.type)
        assert_trains_as(several, one, slots)
