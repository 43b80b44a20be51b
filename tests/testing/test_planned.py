"""A step of a user's model by each form, on simulated devices: here with kernels, as in the other tests."""

import argparse

import pytest
import torch
from torch import nn

from dataparallel.testing import planned
from dataparallel.testing.simulated.timeline.presets import RTX_3090

WIDTH = 32


class Tied(nn.Module):
    """Two modules share a parameter, and there is a buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, scale=1.0):
        for block in (self.first, *self.blocks, self.norm, self.last):
            x = block(x)
        return {"loss": (x * scale).square().mean(), "predicted": x}


def make():
    return Tied(), (torch.randn(11, WIDTH),)


def make_on_meta():
    with torch.device("meta"):
        return make()


def make_by_keywords():
    module, (x,) = make()
    return module, {"x": x, "scale": 2.0}


PARAMETERS = sum(4 * parameter.numel() for parameter in Tied().parameters())


@pytest.mark.devices("sim")
@pytest.mark.slots(4)
class TestSteps:
    @pytest.mark.parametrize("made", [make, make_on_meta, make_by_keywords])
    @pytest.mark.parametrize("way", planned.WAYS)
    def test_a_step_is_recorded_and_scheduled(self, slots, way, made):
        step = planned.planned(made, way, slots, RTX_3090)
        assert step.schedule.time > 0
        assert sum(step.from_host) == 4 * 11 * WIDTH, "the batch"
        assert any(launch.in_backward for launch in step.schedule.recording.launches)
        if way == planned.ALONE:
            assert step.received == [0] * 4
            assert step.at_most[1:] == [0] * 3
        else:
            assert step.from_host == [4 * size * WIDTH for size in (3, 3, 3, 2)]
            assert min(step.received) > 0

    def test_each_form_holds_what_it_promises_between_steps(self, slots):
        """One copy, a copy on each device, and a part on each. A shared parameter counts once, on meta devices too."""
        held = {way: planned.planned(make_on_meta, way, slots, RTX_3090).between for way in planned.WAYS}
        assert PARAMETERS < held[planned.ALONE][0] < 1.1 * PARAMETERS
        assert held["DataParallel"][1] < 0.1 * PARAMETERS
        assert min(held["composable.replicate"]) > PARAMETERS
        assert max(held["composable.fully_shard"]) < 0.4 * PARAMETERS

    def test_what_was_on_the_devices_before_does_not_count(self, slots):
        before = planned.planned(make, planned.ALONE, slots, RTX_3090)
        kept = [torch.ones(1000, device=device) for device in slots]
        after = planned.planned(make, planned.ALONE, slots, RTX_3090)
        assert (after.between, after.at_most) == (before.between, before.at_most)
        del kept


@pytest.mark.devices("cpu")
class TestWhatTheFunctionReturns:
    @pytest.mark.parametrize(
        ("returned", "words"),
        [
            (nn.Linear(2, 2), "got Linear"),
            ((nn.Linear(2, 2), torch.ones(2)), "got (Linear, Tensor)"),
            ((1, (2,)), "got (int, tuple)"),
            (None, "got NoneType"),
        ],
    )
    def test_anything_else_is_refused(self, returned, words):
        with pytest.raises(
            argparse.ArgumentTypeError, match="a tuple of positional arguments or a dict of keyword"
        ) as error:
            planned.made(lambda: returned)
        assert str(error.value).endswith(words)

    def test_blocks_are_the_modules_of_the_outermost_lists(self):
        module = Tied()
        assert [*planned.units_of(module)] == [*module.blocks]
        assert [*planned.units_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))] == []
        nested = nn.Sequential(nn.Sequential(nn.ModuleList([Tied()]), nn.ReLU()))
        assert [*planned.units_of(nested)] == [nested[0]]
