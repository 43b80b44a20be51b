"""The transformer trains on slots as on one device, in each form of the library, in float64 to 1e-9."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from dataparallel.testing import ModelArgs, Transformer, parity
from dataparallel.testing.cases import Batch, tokens
from sharded_steps import Model, assert_same_training

every_variant = pytest.mark.parametrize(
    ("tied", "checkpointed"),
    [
        pytest.param(True, True, id="tied, checkpointed"),
        pytest.param(False, False, id="apart, kept"),
        pytest.param(True, False, id="tied, kept", marks=pytest.mark.long),
        pytest.param(False, True, id="apart, checkpointed", marks=pytest.mark.long),
    ],
)


def in_place(module: nn.Module, devices: list, dim: int) -> nn.Module:
    return replicate(module, devices=devices, dim=dim)


WITHOUT_SHARDS = {"DataParallel": DataParallel, "replicate": in_place}
every_form = pytest.mark.parametrize("form", WITHOUT_SHARDS)


def builder(tied: bool, checkpointed: bool, dropout_p: float = 0.0) -> Callable[[], Transformer]:
    def build() -> Transformer:
        args = ModelArgs(dropout_p=dropout_p, weight_tying=tied, checkpoint_activations=checkpointed)
        model: Any = Transformer(args, dtype=torch.float64)
        model.units = lambda: [*model.layers]
        return model

    return build


def batches(slots: list) -> list[Batch]:
    """Samples that divide evenly among the slots, that do not, and too few for all slots."""
    sizes = [2 * len(slots), 2 * len(slots) + 1, 1]
    return [tokens(6, 8)(size, step) for step, size in enumerate(sizes)]


@pytest.mark.slots(2, 3, 8)
@every_form
@every_variant
def test_replicas_train_as_one_device(form, tied, checkpointed, slots):
    parity.assert_same_training(builder(tied, checkpointed), batches(slots), slots, wrap=WITHOUT_SHARDS[form])


@pytest.mark.slots(2, 3, 8)
@every_variant
def test_shards_train_as_one_device(tied, checkpointed, slots):
    assert_same_training(Model(builder(tied, checkpointed), tokens(6, 8)), slots, steps=3)
