"""A sharded model on any streams, its backward on others than its forward; launches and waits grow with the slots."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import clocked
from clocked import check_clocks
from dataparallel.comm.streams.current import Event, streams_joined
from dataparallel.comm.transport_choice import why_no_tables
from dataparallel.composable import MixedPrecisionPolicy, fully_shard
from nogpu.timeline import HOST

pytestmark = pytest.mark.devices("sim", "stand-in")


def sequence(slots: list, *widths: int, **options: Any) -> Any:
    """Linear layers, each of which is a unit."""
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths))).to(slots[0])
    for layer in model:
        fully_shard(layer, devices=slots, **options)
    return fully_shard(model, devices=slots, **options)


def test_gradients_that_wait_on_the_slots_belong_to_the_streams_of_the_step(slots, root):
    """Operators on sharded tensors run on the streams that operators with a graph have used, here other ones."""
    model = fully_shard(nn.Linear(64, 64).to(root), devices=slots)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with streams_joined({device: torch.Stream(device) for device in slots}):
        model.weight * 2
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(6, 64, device=root)).square().mean().backward()
        model(torch.randn(6, 64, device=root)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        check_clocks()


def step_of(slots: list[Any], width: int, policy: MixedPrecisionPolicy, monkeypatch: Any) -> tuple[int, int]:
    """Launches and waits of a step, without its optimizer."""
    model = sequence(slots, *[width] * 4, mp_policy=policy)
    batch = torch.randn(2 * len(slots), width, device=slots[0])
    waits = 0

    def step() -> None:
        model(batch).square().mean().backward()
        model.zero_grad()

    step()
    make_wait = Event.make_wait

    def counted(event: Event, stream: torch.Stream) -> None:
        nonlocal waits
        waits += 1
        make_wait(event, stream)

    with monkeypatch.context() as patch, clocked.counted() as launched:
        patch.setattr(Event, "make_wait", counted)
        step()
    return sum(launched.launches), waits


@pytest.mark.slots(8)
@pytest.mark.parametrize("width", [16, 520], ids=["small units", "units of a mebibyte"])
@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)],
    ids=["fp32", "bf16"],
)
def test_of_a_slot_are_almost_as_few_with_eight_slots_as_with_two(width, policy, slots, monkeypatch):
    """Where kernels read peers. Copies are as many as there are pairs of slots."""
    if (reason := why_no_tables(slots)) is not None:
        pytest.skip(reason)
    launches_of_two, waits_of_two = step_of(slots[:2], width, policy, monkeypatch)
    launches, waits = step_of(slots, width, policy, monkeypatch)
    assert launches / 8 <= 1.1 * launches_of_two / 2
    assert waits / 8 <= 1.5 * waits_of_two / 2


@pytest.mark.devices("stand-in")
@pytest.mark.slots(4)
def test_kernels_carry_buffers_losses_and_their_gradients(slots, root):
    """Where they carry parameters: one launch takes the place of a copy for each slot, one after the other."""
    if (reason := why_no_tables(slots)) is not None:
        pytest.skip(reason)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    model = fully_shard(Net().to(root), devices=slots)
    for pinned in [torch.ones(16, 8, pin_memory=True)] * 2:
        with clocked.timeline() as recorded:
            model(pinned).mean().backward()
    launches = recorded.recording.launches
    assert not [launch for launch in launches if launch.copy is not None and HOST not in launch.copy]
    gathers = [launch for launch in launches if len(launch.peers) == 3 and {each[2] for each in launch.peers} == {4}]
    assert len(gathers) == 1
    check_clocks()
