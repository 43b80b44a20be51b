"""``torch.optim.swa_utils`` beside both forms: averages and BatchNorm statistics are those of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from dataparallel.nn import SyncBatchNorm

FORMS = ["DataParallel", "replicate"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()


def batches(device: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 2, 6, 6, dtype=torch.float64, generator=generator).to(device) for rows in (7, 8, 5, 9)]


def in_form(form: str, module: nn.Module, slots: list) -> nn.Module:
    wrap = (
        DataParallel if form == "DataParallel" else lambda own, devices, **rest: replicate(own, devices=devices, **rest)
    )
    return wrap(module, slots, sync_batch_norm=True)


def plain(form: str, model: nn.Module) -> nn.Module:
    """What is averaged: the module itself."""
    return model.module if form == "DataParallel" else model


def same(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = found.state_dict(), expected.state_dict()
    assert [*ours] == [*theirs]
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-9, check_device=False)


def trained(model: nn.Module, of: nn.Module, averaged: AveragedModel, data: list[Tensor]) -> None:
    """A few steps, with a schedule of SWA; ``of`` is what ``averaged`` is an average of."""
    optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    for batch in data:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(of)
        schedule.step()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["mean", "exponential"])
class TestAverages:
    def both(self, form: str, kind: str, slots: list) -> tuple[AveragedModel, AveragedModel, list[Tensor]]:
        """The averages of a model on ``slots``, and of one on the first device."""
        options: dict[str, Any] = {} if kind == "mean" else {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
        alone, data = net().to(slots[0]), batches(slots[0])
        expected = AveragedModel(alone, **options)
        trained(alone, alone, expected, data)
        module = net().to(slots[0])
        found = AveragedModel(module, **options)  # before the form: the copy is a plain module
        model = in_form(form, module, slots)
        trained(model, plain(form, model), found, data)
        return found, expected, data

    def test_are_those_of_one_device(self, form, kind, slots):
        found, expected, _ = self.both(form, kind, slots)
        same(found, expected)

    def test_statistics_are_updated_on_the_slots(self, form, kind, slots):
        """The average is a module of its own. It runs on the slots if it gets a form too."""
        found, expected, data = self.both(form, kind, slots)
        update_bn(data, expected)
        update_bn(data, in_form(form, found.module, slots))
        SyncBatchNorm.revert(found)
        same(found, expected)


def test_a_wrapper_is_copied_whole(slots):
    """``AveragedModel(wrapper)`` is a wrapper too, and runs on the slots."""
    model = DataParallel(net().to(slots[0]), slots, sync_batch_norm=True)
    averaged = AveragedModel(model)
    assert type(averaged.module) is DataParallel
    alone = copy.deepcopy(model.module)
    for _ in range(2):
        averaged.update_parameters(model)
    batch = batches(slots[0])[0]
    torch.testing.assert_close(averaged(batch), SyncBatchNorm.revert(alone)(batch), rtol=1e-9, atol=1e-9)
    assert {name for name, _ in averaged.named_parameters()} == {
        f"module.module.{name}" for name, _ in model.module.named_parameters()
    }
