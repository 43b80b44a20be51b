"""The launches and waits of a step grow with the number of slots, not with its square."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import comm
from dataparallel.composable import MixedPrecisionPolicy, fully_shard
from dataparallel.streams.current import Event

pytestmark = [pytest.mark.devices("sim"), pytest.mark.usefixtures("one_intra_op_thread")]

UNITS = 3


def step_of(
    slots: list[Any], width: int, policy: MixedPrecisionPolicy, monkeypatch: Any, ways: dict
) -> tuple[int, int]:
    """Launches and waits of a step, without its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(UNITS))).to(slots[0])
    for block in model:
        fully_shard(block, devices=slots, mp_policy=policy)
    fully_shard(model, devices=slots, mp_policy=policy)
    batch = torch.randn(2 * len(slots), width, device=slots[0])
    waits = 0

    def step() -> None:
        with comm.using(**ways):
            loss = model(batch).square().mean()
            loss.backward()
        model.zero_grad()

    step()
    make_wait = Event.make_wait

    def counted(event: Event, stream: torch.Stream) -> None:
        nonlocal waits
        waits += 1
        make_wait(event, stream)

    counts: AbstractContextManager[Any] = torch.sim.counted()
    with monkeypatch.context() as patch, counts as found:
        patch.setattr(Event, "make_wait", counted)
        step()
    return sum(found.launches), waits


@pytest.mark.slots(8)
@pytest.mark.parametrize("width", [16, 520], ids=["small units", "units of a mebibyte"])
@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize(
    "ways",
    [{}, {"route": "star"}, {"route": "tree"}, {"route": "chain"}, {"route": "shards"}, {"transport": "host"}],
    ids=lambda ways: "-".join(ways.values()) or "default",
)
def test_of_a_slot_are_almost_as_few_with_eight_slots_as_with_two(width, policy, ways, slots, monkeypatch):
    launches_of_two, waits_of_two = step_of(slots[:2], width, policy, monkeypatch, ways)
    launches, waits = step_of(slots, width, policy, monkeypatch, ways)
    assert launches / 8 <= 1.5 * launches_of_two / 2
    assert waits / 8 <= 1.5 * waits_of_two / 2
