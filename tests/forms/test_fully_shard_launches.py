"""The launches and waits of a step grow with the number of slots, not with its square."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clocked
from dataparallel import _torch, comm
from dataparallel.comm.streams.current import Event
from dataparallel.composable import MixedPrecisionPolicy, fully_shard
from dataparallel.sharded import ShardedTensor

pytestmark = [pytest.mark.devices("sim", "stand-in"), pytest.mark.usefixtures("one_intra_op_thread")]

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

    found: list[tuple[int, int]] = []
    for _ in range(3):  # a slot that is held up has the others pull a unit by themselves
        waits = 0
        with monkeypatch.context() as patch, clocked.counted() as launched:
            patch.setattr(Event, "make_wait", counted)
            step()
        found.append((sum(launched.launches), waits))
    return min(found)


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


@pytest.mark.slots(4)
def test_versions_are_read_once_for_a_call_and_a_pass_and_where_parameters_are_freed(slots, monkeypatch):
    """Not by each slot for each unit that it uses, gathers ahead, or frees."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(UNITS))).to(slots[0])
    for block in model:
        fully_shard(block, devices=slots)
    fully_shard(model, devices=slots)
    batch = torch.randn(8, 16, device=slots[0])
    model(batch).square().mean().backward()
    read: Counter[bool] = Counter()
    version_of = _torch.version_of

    def counted(tensor: Tensor) -> int:
        read[isinstance(tensor, ShardedTensor)] += 1
        return version_of(tensor)

    monkeypatch.setattr(_torch, "version_of", counted)
    model(batch).square().mean().backward()
    parameters = 2 * UNITS
    assert read[True] <= 3 * parameters
    # Each slot frees twice, each time after a look if somebody has written to them; freeing moves the versions.
    assert read[False] <= 4 * parameters * len(slots)
