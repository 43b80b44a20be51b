"""What the settings of a unit change: which events gathers and sums wait for, and what is gathered at all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backends_events import BackendsEvent
from clocked import timeline
from dataparallel import comm
from dataparallel.composable import CPUOffloadPolicy, fully_shard
from dataparallel.sharded.units.shards import PullSource
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import assert_equal, mean_square_loss
from made_units import recorded_gathers
from sharded_steps import gradients, on_device, sharded, whole

WIDTH = 16


class Layers(nn.Module):
    """An embedding and layers, all of them units."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def units(self) -> list[nn.Module]:
        return [self.embedding, *self.layers]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Model(Layers):
    """With a layer of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(super().forward(tokens))


def tokens(slots: list, seed: int = 0) -> Tensor:
    (x,), _ = numbers(5)(2 * len(slots), seed)
    return (x * 10).long().remainder(7).to(slots[0])


def make(slots: list, **options: Any) -> Any:
    return sharded(on_device(seeded(Model), slots[0]), slots, **options)


def twin_of(slots: list) -> Any:
    return on_device(seeded(Model), slots[0])


def backward(model: Any, slots: list, seed: int = 0) -> None:
    mean_square_loss(model(tokens(slots, seed))).backward()


@pytest.mark.devices("sim", "stand-in")
class TestPostOptimEvent:
    """The optimizer steps on streams of its own. The computing streams do not wait for these."""

    def step_aside(self, model: Any, optimizer: Any, slots: list) -> list[torch.Event]:
        """The optimizer's step on side streams, and an event after it on each device."""
        events = []
        streams = [torch.Stream(device) for device in slots]
        for stream in streams:
            stream.wait_stream(torch.accelerator.current_stream(stream.device))
        before = [torch.accelerator.current_stream(device) for device in slots]
        for stream in streams:
            torch.accelerator.set_stream(stream)
        try:
            optimizer.step()
        finally:
            for stream in before:
                torch.accelerator.set_stream(stream)
        for stream in streams:
            events.append(stream.record_event())
        self.streams = streams
        return events

    @pytest.mark.parametrize("kind", [torch.Event, BackendsEvent])
    def test_gathers_wait_for_it(self, kind, slots):
        model, twin = make(slots), twin_of(slots)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
        for seed in range(3):
            backward(model, slots, seed)
            backward(twin, slots, seed)
            events = self.step_aside(model, optimizers[0], slots)
            model.set_post_optim_event(events if kind is torch.Event else [*map(kind, events)])
            optimizers[1].step()
            found, expected = model(tokens(slots)), twin(tokens(slots))
            assert_equal(whole(found), whole(expected), "outputs", atol=1e-9)
            for stream in self.streams:  # the rest of this loop is on the current streams
                torch.accelerator.current_stream(stream.device).wait_stream(stream)
            for optimizer in optimizers:
                optimizer.zero_grad()

    def test_without_it_they_do_not_wait_for_other_streams(self, slots):
        """It is the event that orders them: the clocks see that nothing else does."""
        model = make(slots)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, slots)
        self.step_aside(model, optimizer, slots)
        with pytest.raises(RuntimeError, match="race"):
            model(tokens(slots))
        for device in slots:
            torch.accelerator.synchronize(device)

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

    def test_one_event_may_stand_for_all_devices(self, slots):
        model = make(slots)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, slots)
        events = self.step_aside(model, optimizer, slots)
        for event in events:
            self.streams[0].wait_event(event)
        model.set_post_optim_event(self.streams[0].record_event())
        model(tokens(slots))
        for device in slots:
            torch.accelerator.synchronize(device)

    def test_shards_with_new_memory_are_packed_after_it(self, slots):
        """Other code has given a parameter new memory, while the optimizer's step on others may still run."""
        model = make(slots)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, slots)
        events = self.step_aside(model, optimizer, slots)
        bias = model.last.bias
        bias._shards = tuple(torch.ones_like(shard) for shard in bias.shards)
        model.set_post_optim_event(events)
        model(tokens(slots))
        for device in slots:
            torch.accelerator.synchronize(device)


class TestIsLastBackward:
    @pytest.mark.devices("sim", "stand-in")
    def test_a_backward_that_is_not_the_last_leaves_sums_on_their_way(self, slots):
        """The clocks see that the current streams have not waited for the sums of the first unit."""
        model = make(slots)
        model.set_is_last_backward(False)
        backward(model, slots)
        with pytest.raises(RuntimeError, match="race"):
            gradients(model)
        model.set_is_last_backward(True)
        backward(model, slots)
        gradients(model)

    @pytest.mark.devices("sim", "stand-in")
    def test_the_host_does_not_wait(self, slots):
        """Gradients arrive on the host later, with the last backward or the next forward."""
        model = make(slots, offload_policy=CPUOffloadPolicy())
        model.set_is_last_backward(False)
        backward(model, slots)
        assert all(parameter.grad is None for parameter in model.parameters())
        with torch.no_grad():
            model(tokens(slots))
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[PullSource]:
    """The sources that slots have pulled from."""
    return recorded_gathers(monkeypatch)


class TestUnshardInBackward:
    def test_a_unit_without_it_is_not_gathered(self, slots, gathered):
        model, twin = make(slots), twin_of(slots)
        loss = mean_square_loss(model(tokens(slots)))
        gathered.clear()
        loss.backward()
        assert len(gathered) == 4 * len(slots)
        model.zero_grad()
        model.embedding.set_unshard_in_backward(False)
        loss = mean_square_loss(model(tokens(slots)))
        gathered.clear()
        loss.backward()
        owned = {id(source._owned) for source in gathered}
        unit = fully_shard.state(model.embedding).unit
        assert id(unit.owned[0]) not in owned
        assert len(gathered) == 3 * len(slots)
        backward(twin, slots)
        assert_equal(gradients(model), gradients(twin), "gradients", atol=1e-9)


class TestAllReduceHook:
    """It sees what each owner has added up of its unit, before that is the gradient."""

    def test_it_is_called_once_for_each_owner(self, slots):
        devices = []
        model = make(slots)
        model.set_all_reduce_hook(lambda part: devices.append(part.device))
        backward(model, slots)
        assert sorted(map(str, devices)) == sorted(map(str, slots))

    def test_an_error_of_it_is_that_of_the_backward(self, slots):
        model = make(slots)
        model.set_all_reduce_hook(lambda part: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model, slots)


class TestGradientsThatWait:
    """``.grad`` says what becomes of gradients that wait on the slots."""

    def test_they_stay_if_it_is_scaled(self, slots):
        """It is zero so far, and scaled zeros are no gradient that somebody has set to zero."""
        model, twin = make(slots), twin_of(slots)
        with model.no_sync():
            backward(model, slots, 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        backward(model, slots, 2)
        for seed in (1, 2):
            backward(twin, slots, seed)
        assert_equal(gradients(model), gradients(twin), "gradients", atol=1e-9)

    @pytest.mark.parametrize("foreach", [False, True])
    def test_they_are_void_once_it_is_set_to_zero(self, foreach, slots):
        model, twin = make(slots), twin_of(slots)
        optimizer = torch.optim.SGD(model.parameters(), foreach=foreach)
        with model.no_sync():
            backward(model, slots, 1)
        optimizer.zero_grad(set_to_none=False)
        for each in (model, twin):
            backward(each, slots, 2)
        assert_equal(gradients(model), gradients(twin), "gradients", atol=1e-9)
