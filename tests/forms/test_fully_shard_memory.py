"""The bytes that a sharded model needs on each simulated device: exact between steps, bounded during a step."""

import time
from collections.abc import Callable
from math import ceil, prod
from typing import Any

import pytest
import torch
from loops import wait_for_the_engine
from torch import Tensor, nn

from dataparallel import comm
from dataparallel.composable import MixedPrecisionPolicy, fully_shard
from dataparallel.sharded.units import backward
from freed_later import freed_later
from memory import allocated, nbytes
from selection import others_long
from sharded_steps import no_sync, sharded

pytestmark = [
    pytest.mark.devices("sim"),
]

IN_16_BITS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

STATES = 3
"""Of a parameter, between two steps of AdamW: itself and two averages."""

WIDTH, BLOCKS = 520, 6
SAMPLES = 2
"""Few for each slot, so that activations are small beside a unit."""

LAG = 0.1
"""Seconds. Other slots are more patient than this."""

ROW = SAMPLES * WIDTH * 4
"""Bytes of a slot's activation."""

ACTIVATIONS = (3 * BLOCKS + 8) * ROW
"""At most, of a slot: two tensors for each block are saved, and some are on their way."""


class Block(nn.Module):
    """A residual layer of more than a mebibyte. In backward, the slot with the number ``lags`` sleeps."""

    def __init__(self, lags: list[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.lags = lags

    def forward(self, x: Tensor, shared: Tensor | float = 0.0) -> Tensor:
        y = x + torch.tanh(self.linear(x + shared))
        if y.requires_grad and y.device.index in self.lags:
            y.register_hook(lambda gradient: time.sleep(LAG))
        return y


class Deep(nn.Module):
    """Blocks, which are the units, and a small head."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.lags: list[int] = []  # the same list on every slot
        self.blocks = nn.ModuleList(Block(self.lags) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 8)

    def units(self) -> list[nn.Module]:
        return [*self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def deep(blocks: int = BLOCKS) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Deep(blocks)


UNIT = nbytes(Deep(1).blocks.parameters())
ROOT = nbytes(Deep(1).head.parameters())


class Training:
    """A sharded model, a batch and AdamW."""

    def __init__(self, slots: list, model: nn.Module, **options: Any) -> None:
        if "units" in options:  # which the library chooses
            model = fully_shard(model.to(slots[0]), devices=slots, **options)
        else:
            sharded(model, slots, **options)
        self.slots, self.model = slots, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.x = torch.ones(SAMPLES * len(slots), WIDTH, device=slots[0])

    def step(self, before_optimizer: Callable[[], None] = lambda: None, quietly: bool = False) -> None:
        """With ``quietly`` after a batch without sums."""
        if quietly:
            with no_sync(self.model):
                self.model(self.x).square().mean().backward()
        self.model(self.x).square().mean().backward()
        before_optimizer()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def peaks_of_backward(training: Training, before: list[int], quietly: bool = False) -> list[int]:
    """The most bytes on each device in a step, but for its optimizer, beyond those ``before``."""
    peaks: list[int] = []

    def note() -> None:
        for slot, old in zip(training.slots, before, strict=True):
            torch.sim.synchronize(slot)
            peaks.append(torch.sim.max_memory_allocated(slot) - old)

    for slot in training.slots:
        torch.sim.synchronize(slot)
        torch.sim.reset_peak_memory_stats(slot)
    training.step(note, quietly)
    return peaks


def idle_bytes(model: nn.Module, owner: int) -> int:
    """What an owner has between two steps: its flat shards, and its part of two averages of each parameter.

    A flat shard has room for the largest part of each parameter, rounded up to a multiple of 8 elements.
    """
    found = 0
    for parameter in model.parameters():
        rows, *others = parameter.shape
        part = ceil(rows / len(parameter.devices)) * prod(others)
        found += ceil(part / 8) * 8 * parameter.dtype.itemsize + (STATES - 1) * parameter.shards[owner].nbytes
    return found


# ---- between steps ---------------------------------------------------------------------------------------------------


@pytest.mark.few(5)
@pytest.mark.slots(4, long=[8])
@pytest.mark.parametrize("transport", ["kernels", "copy"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"units": "auto"},
        {"units": "auto", "reshard_after_forward": False},
        {"mp_policy": IN_16_BITS},
    ],
    ids=["default", "no reshard", "in twos", "auto", "auto without reshard", "bfloat16"],
)
def test_steps_do_not_add_up_and_nothing_stays(options, transport, slots, root):
    """The same bytes after each step, and those that there were before once the model is gone."""
    with comm.using(transport=None if transport == "kernels" else transport):
        before = allocated(slots)
        training = Training(slots, Deep(3), **options)
        for _ in range(3):
            training.step()
        wait_for_the_engine(slots)
        idle = allocated(slots)
        for _ in range(4):
            training.step()
            with torch.no_grad():
                training.model(training.x)
            training.step(quietly=True)
        wait_for_the_engine(slots)
        assert allocated(slots, idle) == idle
        expected = [old + idle_bytes(training.model, owner) for owner, old in enumerate(before)]
        expected[0] += training.x.nbytes
        assert idle == expected
        del training
        assert allocated(slots, before) == before


@pytest.mark.slots(4)
def test_an_output_that_is_kept_keeps_no_parameters(slots, root):
    """The graph of a call has its activations, and refers to parameters that are freed."""
    training = Training(slots, Deep(3))
    training.step()
    training.model.set_reshard_after_forward(True, recurse=False)
    wait_for_the_engine(slots)
    idle = allocated(slots)
    output = training.model(training.x)
    held = [now - old for now, old in zip(allocated(slots), idle, strict=True)]
    assert max(held) <= ACTIVATIONS
    del output
    assert allocated(slots, idle) == idle


# ---- during a step ---------------------------------------------------------------------------------------------------


def bound(slots: int, weights: int, gradients: int = 2 * UNIT) -> int:
    """Shards of parameters, averages and gradients; activations; the root's weights; what is not sharded."""
    parameters = BLOCKS * UNIT + ROOT
    padding = (STATES + 1) * (2 * BLOCKS + 2) * 8 * 4
    return (STATES + 1) * parameters // slots + padding + ACTIVATIONS + ROOT + weights + gradients


@freed_later
@pytest.mark.slots(4, long=[8])
@pytest.mark.parametrize(
    ("way", "lags"),
    others_long(
        [
            (way, lags)
            for way in ("default", "no prefetch", "no sync", "auto", "copies", "bfloat16")
            for lags in ((), (1,), (0,))
        ]
        + [("compiled", ())],
        short=[
            ("default", ()),
            ("default", (1,)),
            ("no sync", ()),
            ("auto", ()),
            ("bfloat16", ()),
        ],
    ),
    ids=str,
)
def test_a_step_needs_at_most_two_units_of_weights_and_two_of_gradients(way, lags, slots, root, monkeypatch):
    """Beside the shards, also where one slot takes longer than others: these do not run ahead."""
    assert backward._PATIENCE > LAG
    monkeypatch.setattr(backward, "_PATIENCE", 30.0)  # a busy machine may take longer than a slot lags
    before = allocated(slots)
    options: dict[str, Any] = {
        "auto": {"units": "auto"},
        "bfloat16": {"mp_policy": IN_16_BITS},
        "compiled": {"compile": {"backend": "aot_eager"}},
    }.get(way, {})
    training = Training(slots, deep(), **options)
    before[0] += training.x.nbytes
    for module in (training.model, *training.model.units()) if way == "no prefetch" else ():
        module.set_modules_to_forward_prefetch([])
        module.set_modules_to_backward_prefetch([])
    quietly = way == "no sync"
    for _ in range(2):
        training.step(quietly=quietly)
    training.model.lags.extend(lags)
    everything = BLOCKS * UNIT + ROOT
    most = {
        "default": bound(len(slots), 2 * UNIT, 2 * UNIT),
        # In the last unit's backward an owner also has gradients that it receives. Parameters that are copied out of
        # the gather's matrix are there twice, but then there is one unit of gradients.
        "no prefetch": bound(len(slots), UNIT + UNIT // len(slots)),
        # All gradients wait on each slot. Sums take memory of their own until the pass has succeeded.
        "no sync": bound(len(slots), 2 * UNIT, everything + 2 * UNIT + everything // len(slots)),
        "auto": bound(len(slots), 2 * UNIT),
        # An owner also has rows that it receives, and a unit that is copied out of its matrix is there twice.
        "copies": bound(len(slots), 2 * UNIT, 2 * UNIT + UNIT // len(slots)),
        "bfloat16": bound(len(slots), UNIT, UNIT),
        "compiled": bound(len(slots), 2 * UNIT),
    }[way]
    with comm.using(transport="copy" if way == "copies" else None):
        for _ in range(3):
            assert max(peaks_of_backward(training, before, quietly)) <= most


class Scored(Block):
    def forward(self, x: Tensor, shared: Tensor | float = 0.0) -> Any:
        y = super().forward(x, shared)
        return y, y[:, :8].exp()


class Scores(Deep):
    """One tensor that needs a gradient goes to all blocks, as conditions and states of an encoder do.

    Each block has a second output, as those with a router do, which goes into the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Scored(self.lags) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        shared, scores = torch.tanh(self.make(x)), []
        for block in self.blocks:
            x, score = block(x, shared)
            scores.append(score)
        return torch.cat([self.head(x), *scores], dim=1)


@pytest.mark.slots(4)
def test_gradients_that_reach_all_units_do_not_keep_them_full(slots, root, monkeypatch):
    """That of a shared tensor is complete only when the backward of the first unit has run."""
    monkeypatch.setattr(backward, "_PATIENCE", 30.0)
    before = allocated(slots)
    training = Training(slots, Scores())
    before[0] += training.x.nbytes
    for _ in range(2):
        training.step()
    most = bound(len(slots), 2 * UNIT) + (STATES + 1) * (WIDTH + 1) * 4
    for _ in range(3):
        assert max(peaks_of_backward(training, before)) <= most


# ---- a model that does not fit ---------------------------------------------------------------------------------------


@freed_later
@pytest.mark.slots(4)
def test_a_model_that_does_not_fit_on_one_device_trains_on_four(slots, root, monkeypatch):
    """A device has room for little more than its parameters. A step on one device needs four times as much."""
    monkeypatch.setattr(backward, "_PATIENCE", 30.0)  # on a busy machine a slot may lag
    model = deep(24)
    parameters = nbytes(model.parameters())
    before = allocated(slots)
    for slot, now in zip(slots, before, strict=True):
        torch.sim.set_memory_capacity(now + int(1.3 * parameters), slot)
        torch.sim.reset_peak_memory_stats(slot)
    try:
        training = Training(slots, model)
        peaks = [torch.sim.max_memory_allocated(slot) - old for slot, old in zip(slots, before, strict=True)]
        # Shards of all units; of one, the parts before they are packed into its flat shard.
        assert max(peaks) <= (parameters + UNIT) // 4 + 50 * 64 + training.x.nbytes
        for _ in range(3):
            training.step()
    finally:
        for slot in slots:
            torch.sim.set_memory_capacity(None, slot)


# ---- a device that has no room ---------------------------------------------------------------------------------------


@pytest.mark.slots(4)
def test_a_first_call_that_found_no_room_on_one_slot_can_be_repeated(slots, root):
    training = Training(slots, deep(2))
    torch.sim.set_memory_capacity(torch.sim.memory_allocated(slots[2]) + UNIT // 2, slots[2])
    try:
        with pytest.raises(torch.OutOfMemoryError, match=rf"{slots[2]} has no room .* of parameters of the unit"):
            training.step()
    finally:
        torch.sim.set_memory_capacity(None, slots[2])
    training.step()
