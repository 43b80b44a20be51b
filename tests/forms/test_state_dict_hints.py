"""A state dict with the names of another model is refused as by torch, and the error says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from each_form import Form, by_wrapper, replicated, sharded_whole


def build(root: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(root)


def with_prefix(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {prefix + name: value for name, value in state.items()}


def whole_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    return {"epoch": 3, "optimizer": {"state": {}}, "model": state}


OF_A_WRAPPER = r"begin with 'module\.', which comes from a DataParallel\. To take it off in place: torch\.nn\.modules\."


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        (by_wrapper, dict, r"Missing key(?s:.*)write model\.module\.load_state_dict\(state_dict\)"),
        (by_wrapper, with_prefix("module.module."), "begin with 'module.', which comes from a DataParallel"),
        (by_wrapper, whole_checkpoint, r"is an entry of this one: load state_dict\['model'\]"),
        (replicated, with_prefix("module."), OF_A_WRAPPER),
        (replicated, whole_checkpoint, r"is an entry of this one: load state_dict\['model'\]"),
        (replicated, with_prefix("_orig_mod."), r"begin with '_orig_mod\.', which comes from torch\.compile"),
        (sharded_whole, with_prefix("module."), OF_A_WRAPPER),
    ],
)
def test_the_state_of_another_model(form: Form, change: Callable, words: str, slots: list, root: torch.device) -> None:
    state = change(build(root).state_dict())
    with pytest.raises(RuntimeError, match=words):
        form(build(root), slots).load_state_dict(state)


def test_what_the_messages_say_works(slots: list, root: torch.device) -> None:
    state = DataParallel(build(root), slots).state_dict()
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    replicate(build(root), devices=slots).load_state_dict(state)
    DataParallel(build(root), slots).module.load_state_dict(state)


def test_the_full_state_of_a_sharded_model(slots: list, root: torch.device) -> None:
    state = DataParallel(build(root), slots).state_dict()
    with pytest.raises(ValueError, match=r"it lacks '0\.weight'.* The names begin with 'module\.'"):
        fully_shard.load_full_state_dict(fully_shard(build(root), devices=slots), state)


def test_other_errors_stay_as_they_are(slots: list, root: torch.device) -> None:
    model = DataParallel(build(root), slots)
    state = {**model.state_dict(), "module.0.bias": torch.zeros(7)}
    with pytest.raises(RuntimeError, match=r"size mismatch for module\.0\.bias") as error:
        model.load_state_dict(state)
    assert "names" not in str(error.value)
    assert model.load_state_dict({}, strict=False).missing_keys
