"""What a step asks of CUDA once it has settled: no wait of the host, no memory, no stream, no context.

A wait of the host keeps it from launching work for all other devices. Memory that is taken or given back waits for a
whole device.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from nogpu import cuda
from sharded_steps import MODELS, Batch, batches_of, on_device, sharded

pytestmark = pytest.mark.devices("stand-in")

SETTLE = 40  # steps in which orders and numbers of permits are learnt, and all memory is taken

FORMS: dict[str, Callable[[Any, list[torch.device]], nn.Module]] = {
    "DataParallel": DataParallel,
    "replicate": lambda model, slots: replicate(model, devices=slots),
    "fully_shard": sharded,
    "fully_shard, gathered once": lambda model, slots: sharded(model, slots, reshard_after_forward=False),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    model(*batch[0], **batch[1]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slots(3, long=[2, 8])
@pytest.mark.parametrize("name", ["gpt", pytest.param("resnet", marks=pytest.mark.long)])
@pytest.mark.parametrize("form", FORMS)
def test_a_settled_step_asks_cuda_for_nothing_but_work(form: str, name: str, slots: list) -> None:
    batch = next(batches_of(MODELS[name], slots))
    model = FORMS[form](on_device(MODELS[name].build, slots[0]), slots)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(SETTLE):
        step(model, optimizer, batch)
    with cuda.counted() as counts:
        for _ in range(3):
            step(model, optimizer, batch)
    assert not counts.host_waits, [*map(str, counts.host_waits)]
    assert (counts.allocations, counts.frees, counts.new_streams, counts.new_contexts) == (0, 0, 0, [])
