"""``fully_shard(model, units="auto")`` finds the blocks of models that people use, and trains as one device does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import MixedPrecisionPolicy, fully_shard
from dataparallel.forms import unit_choice
from dataparallel.forms.unit_choice import units_of
from dataparallel.testing.cases import seeded, tokens
from sharded_steps import Model, assert_same, batches_of, on_device, train


class GPT(nn.Module):
    """Blocks below a backbone, and a head that is tied to the embedding."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Embedding(11, width)
        layer = nn.TransformerEncoderLayer
        self.backbone.blocks = nn.ModuleList(
            layer(width, 2, 2 * width, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.backbone.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.backbone.embedding(tokens)
        for block in self.backbone.blocks:
            x = block(x)
        return self.head(x)


def bottleneck(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))


ONLY_CPU = pytest.mark.devices("cpu")


@ONLY_CPU
def test_blocks_of_a_backbone_are_units_and_what_is_tied_stays() -> None:
    with torch.device("meta"):
        model = GPT(width=512)
    assert units_of(model) == [[block] for block in model.backbone.blocks]


@ONLY_CPU
def test_many_small_neighbours_share_a_unit() -> None:
    """Until they have a sixteenth of the model, and 1 MiB: a smaller unit costs more than it saves. There is none."""
    for width, together, left in ((300, 4, 0), (150, 12, 4), (40, 0, 64)):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(64)))
        units = units_of(model)
        assert [block for unit in units for block in unit] == [*model][: 64 - left]
        assert all(len(unit) == together for unit in units)


@ONLY_CPU
def test_stages_of_blocks_are_looked_into() -> None:
    """As in a ResNet: the blocks are units, and neither their stages nor their layers."""

    class Bottleneck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(256, 256, 3)
            self.downsample = bottleneck(256)

        def forward(self, x: Tensor) -> Tensor:
            return self.downsample(self.conv(x))

    with torch.device("meta"):
        stages = [nn.Sequential(*(Bottleneck() for _ in range(3))) for _ in range(4)]
        model = nn.Sequential(nn.Conv2d(3, 256, 7), *stages, nn.Linear(256, 10))
    blocks = {id(block) for stage in stages for block in stage}
    chosen = [module for unit in units_of(model) for module in unit]
    assert {id(module) for module in chosen} >= blocks
    assert not any(isinstance(module, nn.BatchNorm2d) or module in stages for module in chosen)


@ONLY_CPU
def test_a_block_that_shares_a_parameter_is_left_to_the_model() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 512))
    model[2].weight = model[0].weight
    assert units_of(model) == [[model[1]]]


class Stepped(nn.Module):
    """It has no ``forward``: other code calls a method that has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


@ONLY_CPU
def test_what_is_not_called_and_what_is_listed_before_is_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_choice, "_LEAST_BYTES", 1)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    uncalled = [nn.ModuleDict({"a": nn.Linear(8, 8)}), nn.ParameterList([torch.zeros(8)]), Stepped()]
    model = nn.ModuleList([nn.ModuleList([*uncalled, first]), nn.ModuleList([first, second])])
    assert units_of(model) == [[first], [second]]


@pytest.mark.parametrize("reshard", [True, False])
def test_a_step_equals_one_device(
    reshard: bool, slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_choice, "_LEAST_BYTES", 1)
    trained = Model(seeded(GPT), tokens(5, 11))
    model, alone = (on_device(trained.build, root) for _ in range(2))
    fully_shard(model, devices=slots, units="auto", reshard_after_forward=reshard)
    assert all(fully_shard.state(block) is not None for block in model.backbone.blocks)
    assert_same(*(train(each, batches_of(trained, slots)) for each in (model, alone)))


@ONLY_CPU
def test_a_list_of_modules_has_units_of_the_users_own(slots: list) -> None:
    with pytest.raises(ValueError, match="units='auto': expected one module"):
        fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], devices=slots, units="auto")


def test_only_the_output_of_the_model_is_cast(slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the blocks, such as the head, computes in the dtype of its parameters."""
    monkeypatch.setattr(unit_choice, "_LEAST_BYTES", 1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(GPT().to(root), devices=slots, units="auto", mp_policy=policy)
    output = model(torch.arange(12, device=root).view(-1, 2) % 11)
    assert output.dtype == torch.float32
    output.sum().backward()
