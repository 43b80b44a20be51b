"""A forward with inputs in host memory starts its copies while the step before still runs, and the host goes on.

The clocks know what each stream and the host have waited for. A step leaves a mark on each computing stream, as its
last work. Whoever can use the mark without a race has waited for the whole step.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, prefetch, scatter, scatter_kwargs
from dataparallel.call.parallel_apply import SERIAL_VARIABLE
from dataparallel.comm.streams import ahead
from dataparallel.comm.streams.current import streams_set
from dataparallel.composable import replicate
from spare_streams import spare_stream

pytestmark = [pytest.mark.devices("sim", "stand-in"), pytest.mark.apart(8)]

both_forms = pytest.mark.parametrize("form", ["DataParallel", "replicate"])
host_memory = pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
arrangements = pytest.mark.parametrize("slots", [[0, 1, 2], [0, 0, 1], [0, 0, 0], [0]], ids=str, indirect=True)


class Step:
    """What a step leaves on each device, and who has waited for it. Made before the first step."""

    def __init__(self, slots: list) -> None:
        self.last = {device: torch.zeros(1, device=device) for device in dict.fromkeys(slots)}
        self._others = {device: spare_stream(device) for device in self.last}

    def ends(self) -> None:
        """Launches the last work of a step on each computing stream."""
        for last in self.last.values():
            last.add_(1)

    def known_to(self, stream: torch.Stream) -> bool:
        last = self.last[stream.device]
        with streams_set({stream.device: stream}):
            try:
                last + 0
            except RuntimeError as error:
                if "race" in str(error):
                    return False
                raise
        torch.accelerator.current_stream(stream.device).wait_stream(stream)  # the next step writes to it
        return True

    def known_to_host(self) -> bool:
        """True if the host has waited for a step: an unused stream knows only what the host knows."""
        return any([self.known_to(stream) for stream in self._others.values()])


class Looks(nn.Module):
    """A layer that calls ``look`` first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.look: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        return self.layer(x)


def in_form(form: str, model: Looks, slots: list) -> nn.Module:
    return DataParallel(model, slots) if form == "DataParallel" else replicate(model, devices=slots)


def batch(pin_memory: bool) -> Tensor:
    x = torch.arange(42.0).reshape(7, 6)
    return x.pin_memory() if pin_memory else x


@pytest.fixture(autouse=True)
def serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls of a model are timed, and wait for the devices. Those in one thread are not."""
    monkeypatch.setenv(SERIAL_VARIABLE, "1")


@pytest.fixture
def slots(request: pytest.FixtureRequest, make_slots: Callable[[int], list]) -> list:
    """On the devices of `arrangements`, or three as elsewhere."""
    indices = getattr(request, "param", None)
    return make_slots(3) if indices is None else [torch.device(index) for index in indices]


@pytest.fixture
def camera() -> Iterator[Callable[[Tensor], None]]:
    """A function by which another device fills pinned memory. Nothing but the host orders it after the copies."""
    device = torch.device(7)

    def fill(memory: Tensor) -> None:
        with torch.no_grad():
            memory.copy_(torch.full(memory.shape, -1.0, device=device), non_blocking=True)

    yield fill
    torch.accelerator.synchronize(device)


def train(model: nn.Module, x: Tensor, step: Step) -> None:
    forward_and_backward(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=1e-4)
    step.ends()


def forward_and_backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


@both_forms
@host_memory
@arrangements
def test_nobody_waits_for_the_step_before(
    form: str, pin_memory: bool, slots: list, root: torch.device, copy_streams: list[torch.Stream]
) -> None:
    source, step, looked = Looks().to(root), Step(slots), []

    def look() -> None:
        looked.append((step.known_to_host(), any([step.known_to(stream) for stream in copy_streams])))

    model = in_form(form, source, slots)
    train(model, batch(pin_memory), step)
    copy_streams.clear()
    source.look = look
    forward_and_backward(model, batch(pin_memory))
    assert len({*copy_streams}) == len({*slots})  # one for each device
    assert looked == [(False, False)] * len(slots)
    assert not step.known_to_host()  # nor in backward


@host_memory
def test_nobody_waits_for_the_step_before_where_workers_run_the_replicas(
    pin_memory: bool, slots: list, root: torch.device, copy_streams: list[torch.Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SERIAL_VARIABLE)
    step, model = Step(slots), DataParallel(Looks().to(root), slots, workers=2)
    train(model, batch(pin_memory), step)
    copy_streams.clear()
    forward_and_backward(model, batch(pin_memory))
    assert copy_streams
    assert not step.known_to_host()
    assert not any([step.known_to(stream) for stream in copy_streams])


@host_memory
@arrangements
def test_prefetch_waits_for_no_step(
    pin_memory: bool, slots: list, root: torch.device, copy_streams: list[torch.Stream]
) -> None:
    """Neither its copies, when they are sent, nor the host, when a batch is released."""
    step, model = Step(slots), DataParallel(Looks().to(root), slots)
    for x in prefetch([batch(pin_memory) for _ in range(4)], model):
        assert not any([step.known_to(stream) for stream in copy_streams if step.last[stream.device]._version])
        assert not step.last[root]._version or not step.known_to_host()
        copy_streams.clear()
        train(model, x, step)


@both_forms
@arrangements
def test_a_pinned_batch_is_the_callers_when_the_call_returns(
    form: str, slots: list, root: torch.device, camera: Callable
) -> None:
    model, step, x = in_form(form, Looks().to(root), slots), Step(slots), batch(True)
    expected = nn.functional.linear(x, *(p.detach().cpu() for p in model.parameters()))
    for _ in range(2):
        output = model(x)
        camera(x)
        step.ends()
        assert not step.known_to_host()
        torch.testing.assert_close(output.cpu(), expected)
        torch.accelerator.synchronize(torch.device(7))
        x.copy_(batch(False))


def test_a_scatter_outside_of_a_call_waits_for_its_copies(slots: list, root: torch.device, camera: Callable) -> None:
    model = DataParallel(Looks().to(root), slots)
    scatters = [
        lambda x: scatter(x, slots),
        lambda x: scatter_kwargs((x,), None, slots)[0],
        lambda x: model.scatter((x,), None, slots)[0],
    ]
    for each in scatters:
        x = batch(True)
        chunks = each(x)
        camera(x)
        assert len(chunks) == len(slots)


def test_small_pinned_tensors_are_packed_first_also_the_only_one_of_its_dtype(slots: list, camera: Callable) -> None:
    x, y = torch.ones(6, 2).pin_memory(), torch.ones(6, dtype=torch.float64).pin_memory()
    chunks = scatter((x, y), slots)
    camera(x)
    camera(y)
    assert all(torch.equal(chunk.cpu(), torch.ones_like(chunk, device="cpu")) for pair in chunks for chunk in pair)


def test_what_a_failed_send_has_started_is_waited_for(
    slots: list, camera: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ahead._copy_of

    def copy_of(pinned: Tensor, device: torch.device) -> Tensor:
        if device == slots[-1]:
            raise torch.OutOfMemoryError("made up")
        return real(pinned, device)

    monkeypatch.setattr(ahead, "_copy_of", copy_of)
    x = batch(True)
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        scatter(x, slots)
    camera(x)


@pytest.mark.devices("sim")  # CUDA's allocator rounds sizes up
@host_memory
@arrangements
def test_chunks_are_all_the_memory_of_a_scatter(pin_memory: bool, slots: list) -> None:
    x = batch(pin_memory)
    devices = [*dict.fromkeys(slots)]
    before = [torch.sim.memory_allocated(device) for device in devices]
    for device in devices:
        torch.sim.reset_peak_memory_stats(device)
    chunks = scatter(x, slots)
    of_chunks = [sum(chunk.nbytes for chunk in chunks if chunk.device == device) for device in devices]
    assert sum(of_chunks) == x.nbytes
    expected = [sum(pair) for pair in zip(before, of_chunks, strict=True)]
    assert [torch.sim.memory_allocated(device) for device in devices] == expected
    assert [torch.sim.max_memory_allocated(device) for device in devices] == expected
    del chunks
    assert [torch.sim.memory_allocated(device) for device in devices] == before
