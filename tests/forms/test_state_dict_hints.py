"""A state dict with the names of another model is refused as by torch, and the error says what to write."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from each_form import Form, composable_forms


def build(root: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(root)


def test_a_wrapper_that_gets_the_state_of_its_module(slots: list, root: torch.device) -> None:
    model = DataParallel(build(root), slots)
    state = copy.deepcopy(model.module.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key(?s:.*)write model\.module\.load_state_dict\(state_dict\)"):
        model.load_state_dict(state)
    model.module.load_state_dict(state)  # what the message says


@composable_forms
def test_a_module_that_gets_the_state_of_a_wrapper(form: Form, slots: list, root: torch.device) -> None:
    state = DataParallel(build(root), slots).state_dict()
    model = form(build(root), slots)
    words = r"begin with 'module\.', which comes from a DataParallel\. To take it off in place: torch\.nn\.modules\."
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict(state)
    if form.__name__ == "replicated":
        torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
        model.load_state_dict(state)


def test_a_wrapper_that_gets_the_state_of_a_wrapped_wrapper(slots: list, root: torch.device) -> None:
    model = DataParallel(build(root), slots)
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"begin with 'module\.', which comes from a DataParallel"):
        model.load_state_dict(state)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_whole_checkpoint_in_place_of_the_state_dict(is_wrapped: bool, slots: list, root: torch.device) -> None:
    saved, model = build(root), build(root)
    checkpoint: dict[str, Any] = {"epoch": 3, "optimizer": {"state": {}}, "model": saved.state_dict()}
    loads = DataParallel(model, slots) if is_wrapped else replicate(model, devices=slots)
    with pytest.raises(RuntimeError, match=r"is an entry of this one: load state_dict\['model'\]"):
        loads.load_state_dict(checkpoint)


def test_the_state_of_a_compiled_module(slots: list, root: torch.device) -> None:
    state = {f"_orig_mod.{name}": value for name, value in build(root).state_dict().items()}
    with pytest.raises(RuntimeError, match=r"begin with '_orig_mod\.', which comes from torch\.compile"):
        replicate(build(root), devices=slots).load_state_dict(state)


def test_the_full_state_of_a_sharded_model(slots: list, root: torch.device) -> None:
    state = DataParallel(build(root), slots).state_dict()
    model = fully_shard(build(root), devices=slots)
    with pytest.raises(ValueError, match=r"it lacks '0\.weight'.* The names begin with 'module\.'"):
        fully_shard.load_full_state_dict(model, state)


def test_other_errors_stay_as_they_are(slots: list, root: torch.device) -> None:
    model = DataParallel(build(root), slots)
    state = {**model.state_dict(), "module.0.bias": torch.zeros(7)}
    with pytest.raises(RuntimeError, match=r"size mismatch for module\.0\.bias") as error:
        model.load_state_dict(state)
    assert "names" not in str(error.value)
    assert model.load_state_dict({}, strict=False).missing_keys
