"""What waits for whom while backward computes, by the clocks, whatever the order on the host.

A stream of the test waits for one event and then reads memory that another slot's kernel has written. The clocks raise
exactly if nothing orders the event after that kernel.
"""

import threading
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.autograd.bucket_gradients import Packing, ToSlots
from dataparallel.comm.streams import current
from dataparallel.comm.streams.current import Event, kept_stream, streams_set
from dataparallel.composable import replicate
from spare_streams import spare_stream

pytestmark = [
    pytest.mark.devices("sim", "stand-in"),
    pytest.mark.apart,
    pytest.mark.usefixtures("together", "distinct_streams"),
]

LAYERS = 6
"""More buckets than are held at a time."""

FORMS = ["DataParallel", "replicate", "replicate after no_sync"]

ARRANGEMENTS = {
    "distinct": [0, 1, 2],
    "duplicates": [0, 0, 1, 1],
    "the root twice": [0, 1, 0],
}


@pytest.fixture(params=[*ARRANGEMENTS])
def slots(request: pytest.FixtureRequest) -> list[torch.device]:
    return [torch.device(index) for index in ARRANGEMENTS[request.param]]


@pytest.fixture(params=["in a buffer", "one by one"])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients travel in one buffer, or singly."""
    if request.param == "one by one":
        monkeypatch.setattr(Packing, "bucket_of", lambda self, grads: None)


@pytest.fixture
def distinct_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's streams are new. torch gives out the same few again and again, so older ones may be one stream."""
    monkeypatch.setattr(current, "_kept", {})


class Watched(nn.Module):
    """Layers whose outputs' gradients, by slot and layer, go to ``hook`` in the pass that is watched."""

    def __init__(self, slots: list[torch.device]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(LAYERS))
        # Slots on one device share a generator, so their replicas run one after the other.
        self.turns = {device: cycle([k for k, slot in enumerate(slots) if slot == device]) for device in {*slots}}
        self.hook: Callable[[int, int, Tensor], None] = lambda slot, layer, gradient: None

    def forward(self, x: Tensor) -> Tensor:
        slot = next(self.turns[x.device])
        for k, layer in enumerate(self.layers):
            x = layer(x)
            x.register_hook(lambda gradient, k=k: self.hook(slot, k, gradient))
            x = torch.tanh(x)
        return x


class Step:
    """A step of either form. Other slots compute ahead of the root.

    Attributes:
        seen: the gradients of each slot's layers' outputs, by slot and layer.
        streams: by slot, the stream that computes.
        at: called with the root's layer before the backward of that layer.
    """

    def __init__(self, form: str, slots: list[torch.device], late: int) -> None:
        """``late``: the root waits before this layer until the other devices have been through it, or all if 0."""
        self.form, self.slots, self.late = form, slots, late
        self.seen: dict[tuple[int, int], Tensor] = {}
        self.streams: dict[int, torch.Stream] = {}
        self.at: Callable[[int], None] = lambda layer: None
        self.onlookers: list[torch.Stream] = []
        self.net = Watched(slots).double().to(slots[0])
        if form == "DataParallel":
            self.call: Any = DataParallel(self.net, slots, bucket_cap_mb=1e-9)
        else:
            self.call = replicate(self.net, devices=slots, bucket_cap_mb=1e-9, first_bucket_mb=1e-9)
        self._others = [slot for slot, device in enumerate(slots) if device != slots[0]]
        self._left = {(slot, k): threading.Event() for slot in self._others for k in range(LAYERS)}

    def run(self) -> None:
        x = torch.ones(2 * len(self.slots), 8, dtype=torch.float64, device=self.slots[0])
        for _ in range(2):  # after that, kept replicas know the order of gradients
            self.call(x).square().sum().backward()
        self.net.zero_grad()
        if self.form == "replicate after no_sync":
            with self.net.no_sync():
                for _ in range(2):
                    self.call(x).square().sum().backward()
        self.net.hook = self._hook
        self.call(x).square().sum().backward()
        assert all(parameter.grad is not None for parameter in self.net.parameters())
        for device in {*self.slots}:
            torch.accelerator.synchronize(device)  # streams of the test have read gradients, which may now be freed

    def _hook(self, slot: int, layer: int, gradient: Tensor) -> None:
        self.seen[slot, layer] = gradient
        self.streams[slot] = torch.accelerator.current_stream(gradient.device)
        if slot in self._others:
            self._left[slot, layer].set()
        if slot == 0:
            for other in self._others:
                wanted = 0 if self.late == 0 else max(layer - 1, 0)
                assert self._left[other, wanted].wait(timeout=20)
            self.at(layer)


class Onlooker:
    """On each device a stream that has waited for ``events`` only, and for nothing else of this step."""

    def __init__(self, step: Step, *events: Event) -> None:
        taken = [*step.streams.values(), *step.onlookers]
        self.streams = {device: spare_stream(device, *taken) for device in {*step.slots}}
        for device in self.streams:
            for event in events:
                event.make_wait(self.streams[device])
        step.onlookers += self.streams.values()

    def is_after(self, gradient: Tensor) -> bool:
        """True if the events come after the kernel that has made the gradient."""
        with streams_set({gradient.device: self.streams[gradient.device]}):
            try:
                gradient + 0
            except RuntimeError as error:
                if not str(error).startswith("race"):
                    raise
                return False
        return True


@pytest.mark.parametrize("form", FORMS)
def test_the_root_computes_its_whole_backward_without_waiting_for_another_slot(
    form: str, slots: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(form, slots, late=LAYERS)
    ordered, controls, sums = [], [], []
    summed = ToSlots.sum_over_slots
    monkeypatch.setattr(ToSlots, "sum_over_slots", lambda ctx, brought: sums.append(1) or summed(ctx, brought))

    def look(layer: int) -> None:
        if layer > 0:
            sums.clear() if layer == LAYERS - 1 else None
            return
        assert len(sums) > 2, "later buckets make nobody wait"
        here = step.streams[0]
        others = [slot for slot, stream in step.streams.items() if stream != here]
        onlooker = Onlooker(step, Event(here))
        ordered.extend(onlooker.is_after(step.seen[slot, LAYERS - 2]) for slot in others)
        onlooker = Onlooker(step, *(Event(step.streams[slot]) for slot in others))
        controls.extend(onlooker.is_after(step.seen[slot, LAYERS - 2]) for slot in others)

    step.at = look
    step.run()
    assert len(ordered) == len([slot for slot in slots if slot != slots[0]])
    assert not any(ordered)
    assert all(controls)


@pytest.mark.parametrize("form", FORMS)
def test_a_sum_waits_for_its_gradients_only(form: str, slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's thread is late: the other slots have launched all of their backward before the first sum."""
    step = Step(form, slots, late=0)
    after: list[Event] = []
    summed = ToSlots.sum_over_slots
    watches = []

    def noted(ctx: Any, brought: Any) -> Any:
        total = summed(ctx, brought)
        if watches and not after:
            after.extend(Event(kept_stream(device, "gradients")) for device in {*slots})
        return total

    monkeypatch.setattr(ToSlots, "sum_over_slots", noted)
    ordered, controls, own = [], [], []

    def look(layer: int) -> None:
        watches.append(layer)
        if layer != 0:
            return
        assert after
        # Slots that share a stream run one after the other, the last one first.
        firsts = {stream: slot for slot, stream in sorted(step.streams.items(), reverse=True)}
        others = [slot for slot in firsts.values() if slot > 0]
        onlooker = Onlooker(step, *after)
        ordered.extend(onlooker.is_after(step.seen[slot, 0]) for slot in others)
        own.extend(onlooker.is_after(step.seen[slot, LAYERS - 1]) for slot in others)
        onlooker = Onlooker(step, *map(Event, firsts))
        controls.extend(onlooker.is_after(step.seen[slot, 0]) for slot in others)

    step.at = look
    step.run()
    assert len(ordered) == len({*slots}) - 1
    assert not any(ordered)
    assert all(own), "the gradients of the bucket itself"
    assert all(controls)
