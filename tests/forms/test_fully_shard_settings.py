"""What the settings of a unit change: which events gathers and sums wait for, and what is gathered at all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clocked import timeline
from dataparallel import comm
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import assert_equal, mean_square_loss
from made_units import recorded_gathers
from sharded_chains import Chain, Layer
from sharded_steps import gradients, on_device, sharded


def build() -> Chain:
    """An embedding and layers, all of them units."""
    return Chain(nn.Embedding(7, 6), Layer(), Layer(), Layer(), own=0)


def tokens(slots: list, seed: int = 0) -> Tensor:
    (x,), _ = numbers(5)(2 * len(slots), seed)
    return (x * 10).long().remainder(7).to(slots[0])


def make(slots: list) -> Any:
    return sharded(on_device(seeded(build), slots[0]), slots)


def twin_of(slots: list) -> Any:
    return on_device(seeded(build), slots[0])


def backward(model: Any, slots: list, seed: int = 0) -> None:
    mean_square_loss(model(tokens(slots, seed))).backward()


@pytest.mark.devices("sim", "stand-in")
class TestPostOptimEvent:
    """The optimizer steps on streams of its own. The computing streams do not wait for these."""

    @pytest.mark.apart(2)
    def test_they_wait_for_nothing_else(self, slots):
        """Work that the computing streams were given before the call does not hold up copies, but for the event.

        Kernels write into memory of the computing streams, and wait for these.
        """
        model = make(slots)
        backward(model, slots)
        model.zero_grad()
        side = [torch.Stream(device) for device in slots]
        for device, stream in zip(slots, side, strict=True):
            stream.wait_stream(torch.accelerator.current_stream(device))
        events = [stream.record_event() for stream in side]
        for given, waits in ((None, True), (events, False)):
            if given is not None:
                model.set_post_optim_event(given)
            assert self.first_gather_waits(model, slots) == waits
        assert self.first_gather_waits(model, slots)  # an event is used once

    def first_gather_waits(self, model: Any, slots: list) -> bool:
        """True if the first copy from the last device to the first waits for what it was given before the call."""
        x = tokens(slots)
        with comm.using(transport="copy"), timeline() as recorded, torch.no_grad():
            torch.ones(3, device=slots[-1])
            model(x)
        launches = recorded.recording.launches
        before = next(launch for launch in launches if launch.op != "aten::empty")
        out = slots[-1].index, slots[0].index
        gather = next(launch for launch in launches if launch.copy == out)
        reached, todo = set(), [gather.index]
        while todo:
            index = todo.pop()
            if index not in reached:
                reached.add(index)
                todo += launches[index].waits
                todo += [other.index for other in launches[:index] if other.stream == launches[index].stream]
        return before.index in reached


@pytest.mark.parametrize("unshards", [True, False])
def test_a_unit_is_gathered_in_backward_unless_it_needs_no_weights(unshards, slots, monkeypatch):
    gathered = recorded_gathers(monkeypatch)
    model, twin = make(slots), twin_of(slots)
    model.layers[0].set_unshard_in_backward(unshards)
    loss = mean_square_loss(model(tokens(slots)))
    gathered.clear()
    loss.backward()
    assert len(gathered) == (4 if unshards else 3) * len(slots)
    backward(twin, slots)
    assert_equal(gradients(model), gradients(twin), "gradients", atol=1e-9)


def test_gradients_that_wait_on_the_slots_stay_if_the_others_are_scaled(slots):
    """``.grad`` is zero so far, and scaled zeros are no gradient that somebody has set to zero."""
    model, twin = make(slots), twin_of(slots)
    with model.no_sync():
        backward(model, slots, 1)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    backward(model, slots, 2)
    for seed in (1, 2):
        backward(twin, slots, seed)
    assert_equal(gradients(model), gradients(twin), "gradients", atol=1e-9)
