"""Replicated over machines, a model learns what it learns on one device and under DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from over_machines import (
    adamw,
    assert_close,
    batch_of,
    build,
    gradients,
    loss_of,
    mean_over_ranks,
    over_machines,
    weights,
)
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from machine_ranks import on_machines

STEPS = 20


def train(rank: int, devices: list[torch.device], average: bool = True) -> tuple[list[Any], list[Tensor]]:
    model = over_machines(build(devices[0], seed=rank), devices, average=average)
    optimizer = adamw(model)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(batch_of(rank, step).to(devices[0]))).backward()
        seen.append(gradients(model))
        optimizer.step()
    return seen, weights(model)


def on_one_device(ranks: int, average: bool = True) -> tuple[list[Any], list[Tensor]]:
    model = build(torch.device("cpu"))
    optimizer = adamw(model)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_over_ranks(model, [loss_of(model(batch_of(rank, step))) for rank in range(ranks)], average)
        seen.append(gradients(model))
        optimizer.step()
    return seen, weights(model)


@pytest.mark.parametrize(("ranks", "average"), [pytest.param(2, True, marks=pytest.mark.smoke), (3, True), (2, False)])
def test_training_is_that_of_one_device(ranks: int, average: bool) -> None:
    expected_gradients, expected = on_one_device(ranks, average)
    for seen, found in on_machines(train, average, ranks=ranks):
        for ours, theirs in zip(seen, expected_gradients, strict=True):
            assert_close(ours, theirs)
        assert_close(found, expected)


def train_with_ddp(rank: int, devices: list[torch.device]) -> list[Tensor]:
    torch.set_num_threads(1)
    model = DistributedDataParallel(build(torch.device("cpu"), seed=rank), find_unused_parameters=True)
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(batch_of(rank, step))).backward()
        optimizer.step()
    return weights(model.module)


@pytest.mark.not_detail("torch's wrapper crashes on gloo with it, before it trains")
def test_training_is_that_of_torchs_wrapper() -> None:
    _, expected = on_one_device(2)
    for found in on_machines(train_with_ddp, slots=1, kind="cpu"):
        assert_close(found, expected)
