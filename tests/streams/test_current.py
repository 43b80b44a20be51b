"""A caller that works on its own streams gets the same results as on the default ones, without a race.

Simulated devices show a missing order whatever the timing; CUDA devices only show wrong numbers, now and then.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, comm, parallel_apply, replicate
from dataparallel.autograd import bucket_nodes, functions
from dataparallel.autograd.bucket_nodes import broadcast_bucket
from dataparallel.streams.current import Event, current_streams, streams_set
from dataparallel.streams.gradients import GradientStreams, side_stream
from dataparallel.streams.isolated import isolated_streams
from dataparallel.testing import isolated_slots
from dataparallel.testing.pytest import settle
from dataparallel.threads.settings import TRANSLATED
from graphs import nodes_of

pytestmark = pytest.mark.devices("sim", "cuda")


@pytest.fixture
def side_streams(slots: list) -> Iterator[dict[torch.device, torch.Stream]]:
    """On every device a stream of the caller's is current. Afterwards all are done."""
    devices = [torch.device(slot) for slot in dict.fromkeys(slots)]
    here = torch.accelerator.current_device_index()
    before = {device: torch.accelerator.current_stream(device) for device in devices}
    streams = {device: torch.Stream(device) for device in devices}
    for device, stream in streams.items():
        stream.wait_stream(before[device])
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(here)
    yield streams
    try:
        if devices[0].type == "sim":
            settle()  # before the waits below, which would hide memory that is freed too early
    finally:
        for device, stream in before.items():
            torch.accelerator.synchronize(device)
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(here)


def streams_of(slots: list) -> dict[torch.device, torch.Stream]:
    return current_streams([torch.device(slot) for slot in slots])


def test_streams_are_current_inside_and_the_device_stays(slots: list) -> None:
    before, here = streams_of(slots), torch.accelerator.current_device_index()
    sides = {device: side_stream(device) for device in before}

    def fail() -> None:
        with streams_set(sides):
            assert streams_of(slots) == sides
            assert torch.accelerator.current_device_index() == here
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert streams_of(slots) == before
    assert torch.accelerator.current_device_index() == here


def test_on_the_cpu_there_are_no_streams_to_set(slots: list) -> None:
    before = streams_of(slots)
    with streams_set({}):
        assert streams_of(slots) == before


@pytest.mark.devices("sim")
def test_an_event_holds_a_stream_back_until_what_was_launched_before_it(root: torch.device) -> None:
    side = torch.Stream(root)
    x = torch.ones(2, device=root)
    event = Event(torch.accelerator.current_stream(root))
    with streams_set({root: side}), pytest.raises(RuntimeError, match="race"):
        x.add_(1)
    event.make_wait(side)
    with streams_set({root: side}):
        x.add_(1)
    Event(side).synchronize()
    assert x.tolist() == [2, 2]


# Several threads, each with a current stream of its own


class OneInsideTheOther:
    """The second thread comes into a block while the first is in there, and leaves it after the first."""

    def __init__(self) -> None:
        self.first_is_in, self.second_is_in, self.first_is_out = (threading.Event() for _ in range(3))

    def inside(self) -> None:
        """Called in the block, by the first thread and then by the second one."""
        if not self.first_is_in.is_set():
            self.first_is_in.set()
            assert self.second_is_in.wait(20)
        else:
            self.second_is_in.set()
            assert self.first_is_out.wait(20)

    def run(self, root: torch.device, enter: Callable[[], object]) -> list[bool]:
        """For each thread, if it is on its own stream after ``enter``."""

        def first() -> bool:
            mine = on_a_stream_of_its_own(root)
            enter()
            self.first_is_out.set()
            return torch.accelerator.current_stream(root) == mine

        def second() -> bool:
            mine = on_a_stream_of_its_own(root)
            assert self.first_is_in.wait(20)
            enter()
            return torch.accelerator.current_stream(root) == mine

        with ThreadPoolExecutor(2) as threads:
            return [done.result(30) for done in [threads.submit(first), threads.submit(second)]]


def on_a_stream_of_its_own(root: torch.device) -> torch.Stream:
    """Makes a new stream current in this thread."""
    mine = torch.Stream(root)
    mine.wait_stream(torch.accelerator.current_stream(root))
    torch.accelerator.set_stream(mine)
    return mine


def test_each_thread_goes_back_to_its_own_stream(root: torch.device) -> None:
    order, shared = OneInsideTheOther(), torch.Stream(root)

    def enter() -> None:
        with streams_set({root: shared}):
            order.inside()
            assert torch.accelerator.current_stream(root) == shared

    assert order.run(root, enter) == [True, True]


def test_threads_that_make_the_graphs_of_isolated_slots_at_a_time(
    root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot's stream is one for all threads."""
    slots = [root, root]
    order, apply = OneInsideTheOther(), bucket_nodes.OnSlot.apply

    class Meets:
        @staticmethod
        def apply(*arguments: Any) -> Any:
            if torch.accelerator.current_stream(root) == slots_stream:
                order.inside()
            return apply(*arguments)

    monkeypatch.setattr(bucket_nodes, "OnSlot", Meets)
    with isolated_slots():
        slots_stream = isolated_streams(slots)[1].stream

    def enter() -> None:
        with isolated_slots():
            x = torch.ones(3, device=root, requires_grad=True)
            broadcast_bucket(slots, [x], GradientStreams.for_forward(slots, current_streams(slots)))

    assert order.run(root, enter) == [True, True]


@pytest.mark.slots(2)
def test_two_threads_with_wrappers_and_streams_of_their_own(slots: list, root: torch.device) -> None:
    start = threading.Barrier(2)

    def steps() -> set[bool]:
        mine = on_a_stream_of_its_own(root)
        model, x = build(root), numbers(root)
        expected = gradients(model(x).square().sum(), model, x)
        wrapped, stayed = DataParallel(model, slots), set()
        start.wait(20)
        for _ in range(40):
            output = wrapped(x)
            stayed.add(torch.accelerator.current_stream(root) == mine)
            found = gradients(output.square().sum(), model, x)
            stayed.add(torch.accelerator.current_stream(root) == mine)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        return stayed

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(steps) for _ in range(2)]:
            assert done.result(60) == {True}


def build(root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double().to(root)


def numbers(root: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(13, 6, dtype=torch.float64, generator=generator).to(root).requires_grad_()


def gradients(loss: Tensor, model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x, *model.parameters()]))


@pytest.mark.slots(2, 3, 8)
def test_a_step_on_the_callers_streams(slots: list, root: torch.device, side_streams: dict) -> None:
    model, x = build(root), numbers(root)
    expected = gradients(model(x).square().sum(), model, x)
    for _ in range(3):
        found = gradients(DataParallel(model, slots)(x).square().sum(), model, x)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_training_on_the_callers_streams(slots: list, root: torch.device, side_streams: dict) -> None:
    model, twin = build(root), build(root)
    parallel = DataParallel(model, slots)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
    for _ in range(5):
        x = numbers(root)
        for each, call, optimizer in ((model, parallel, optimizers[0]), (twin, twin, optimizers[1])):
            each.zero_grad()
            call(x).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_double_backward_on_the_callers_streams(slots: list, root: torch.device, side_streams: dict) -> None:
    model, x = build(root), numbers(root)

    def penalty(output: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return gradient.square().sum()

    expected = gradients(penalty(model(x)), model, x)
    for ours, theirs in zip(gradients(penalty(DataParallel(model, slots)(x)), model, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


class Cube(torch.autograd.Function):
    """Its recorded backward still has work to do on the device when the gradient of its gradient is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x * 3 * x)


class Cubes(nn.Module):
    """The input times its parameter, and the cube of that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x * self.weight)


def penalty_of_gradients(model: nn.Module, x: Tensor, to: list[Tensor]) -> list[Tensor]:
    """Third derivatives: gradients of the norm of the gradients of the norm of gradients with respect to ``to``."""
    first = torch.autograd.grad(model(x).square().mean(), to, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().mean() for grad in first), to, create_graph=True)
    return list(torch.autograd.grad(sum(grad.square().mean() for grad in second), to))


@pytest.mark.slots(2, 3, 8)
@pytest.mark.parametrize("route", ["star", "tree", "chain"])
@pytest.mark.parametrize("what", ["input", "weight", "both"])
def test_a_gradient_penalty_on_the_callers_streams(
    what: str, route: str, slots: list, root: torch.device, side_streams: dict
) -> None:
    """The passes that are recorded run in the engine's threads, the nodes that they make on the caller's streams."""
    model, x = Cubes().to(root), numbers(root)
    to = {"input": [x], "weight": [model.weight], "both": [x, model.weight]}[what]
    expected = penalty_of_gradients(model, x, to)
    with comm.using(route=route):
        found = penalty_of_gradients(DataParallel(model, slots), x, to)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_nodes_that_a_recorded_backward_makes_know_the_callers_streams(
    slots: list, root: torch.device, side_streams: dict
) -> None:
    x = numbers(root)
    (gradient,) = torch.autograd.grad(DataParallel(Cubes().to(root), slots)(x).square().sum(), x, create_graph=True)
    nodes = nodes_of(gradient)
    noted = [node.streams for node in nodes if hasattr(node, "streams")]
    names = {type(node).__name__ for node in nodes}
    assert {"ScatterBackward", "GatherBackward"} <= names
    assert all(streams.items() <= side_streams.items() for streams in noted)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("callers", ["default", "side"])
def test_gradients_that_replicas_make_on_streams_of_their_own(
    callers: str, sparse: bool, slots: list, root: torch.device, request: pytest.FixtureRequest
) -> None:
    """They are read on the caller's streams, after they are made and before their memory is used again."""
    if callers == "side":
        request.getfixturevalue("side_streams")

    class Aside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            here, side = torch.accelerator.current_stream(x.device), torch.Stream(x.device)
            side.wait_stream(here)
            x.record_stream(side)
            torch.accelerator.set_stream(side)
            out = torch.nn.functional.embedding(torch.tensor([0, 2, 0], device=x.device), x, sparse=sparse) * 2
            torch.accelerator.set_stream(here)
            here.wait_stream(side)
            out.record_stream(here)
            return out

    x = torch.randn(3 * len(slots), 6, dtype=torch.float64).to(root).requires_grad_()
    for _ in range(2):
        out = DataParallel(Aside(), slots)(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        of_chunk = torch.tensor([16.0, 0, 8], dtype=torch.float64, device=root).repeat(len(slots))[:, None]
        torch.testing.assert_close(gradient.to_dense(), x.detach() * of_chunk, rtol=0, atol=1e-12)


NODES = {
    "broadcast": lambda slots, tensors: functions.Broadcast.apply(slots, *tensors[:2]),
    "reduce": lambda slots, tensors: functions.ReduceAddCoalesced.apply(slots[0], 2, *tensors),
    "scatter": lambda slots, tensors: functions.Scatter.apply(slots, None, 0, tensors[0]),
    "gather": lambda slots, tensors: [functions.Gather.apply(slots[0], 0, *tensors)],
}


@pytest.mark.parametrize("route", ["star", "chain"])
@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("callers", ["default", "side"])
def test_inputs_and_outputs_of_a_node_that_belong_to_other_streams(
    callers: str, name: str, route: str, slots: list, root: torch.device, request: pytest.FixtureRequest
) -> None:
    """The engine orders them against the one stream that it knows of a node, and the node orders the others."""
    if callers == "side":
        request.getfixturevalue("side_streams")
    others = {device: torch.Stream(device) for device in map(torch.device, slots)}
    here = current_streams(others)

    @contextmanager
    def elsewhere(tensors: list[Tensor]) -> Iterator[None]:
        for device, other in others.items():
            other.wait_stream(here[device])
        for tensor in tensors:
            tensor.record_stream(others[tensor.device])
        with streams_set(others):
            yield
        for device, other in others.items():
            here[device].wait_stream(other)

    def gradients_of(place: Callable) -> tuple[Tensor | None, ...]:
        leaves = [torch.ones(6, 4, device=slot).requires_grad_() for slot in slots for _ in range(2)]
        with place(leaves):
            tensors = [leaf * 2 for leaf in leaves]
        for tensor in tensors:
            tensor.record_stream(here[tensor.device])
        with comm.using(route=route):
            outputs = NODES[name](slots, tensors)
        with place(outputs):
            loss = sum((output * weight).sum().to(root) for weight, output in enumerate(outputs, start=1))
        loss.record_stream(here[root])
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    expected, found = gradients_of(lambda _: nullcontext()), gradients_of(elsewhere)
    if root.type == "sim":
        settle()  # before a comparison waits for everything
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.mark.slots(2)
@pytest.mark.parametrize("recorded", [False, True])
def test_gradients_for_a_source_beside_the_slots(
    recorded: bool, slots: list, make_slots: Callable, side_streams: dict
) -> None:
    """They are summed on the caller's stream of its device too, which no slot is on."""
    *_, home = make_slots(3)
    if home in slots:
        pytest.skip("no other device")
    with streams_set({home: torch.Stream(home)}):
        check_against_one_device(recorded, slots, home)
        torch.accelerator.synchronize(home)


def check_against_one_device(recorded: bool, slots: list, home: torch.device) -> None:
    model = build(home)
    parameters = [*model.parameters()]
    inputs = [torch.ones(2, 6, dtype=torch.float64, device=slot) for slot in slots]

    def found(outputs: list[Tensor]) -> list[Tensor]:
        loss = sum(output.square().sum().to(home) for output in outputs)
        grads = torch.autograd.grad(loss, parameters, create_graph=recorded)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), parameters) if recorded else grads)

    expected = found([model(x.to(home)) for x in inputs])
    for ours, theirs in zip(found(parallel_apply(replicate(model, slots), inputs)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_wrapper_recomputes_on_the_callers_streams(
    use_reentrant: bool, slots: list, root: torch.device, side_streams: dict
) -> None:
    model, x = build(root), numbers(root)
    expected = gradients(model(x).square().sum(), model, x)
    wrapped = DataParallel(model, slots)
    checkpoint(wrapped, x, use_reentrant=use_reentrant).square().sum().backward()
    for ours, theirs in zip([x, *model.parameters()], expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=0, atol=1e-12)


@pytest.mark.not_isolated("replicas on one device and the caller's stream")
def test_a_replica_runs_on_the_callers_stream_of_its_device(
    slots: list, root: torch.device, side_streams: dict
) -> None:
    seen = {}

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen[x.device] = (torch.accelerator.current_stream(x.device), torch.accelerator.current_device_index())
            return x * 1

    DataParallel(Looks(), slots)(torch.ones(len(slots), 2, device=root))
    assert seen == {device: (stream, device.index) for device, stream in side_streams.items()}
    for device, stream in side_streams.items():
        assert torch.accelerator.current_stream(device) == stream


def test_a_worker_is_left_on_the_stream_that_it_was_on(slots: list, side_streams: dict) -> None:
    (row,) = (setting for setting in TRANSLATED if setting.name == "current stream")
    devices = [torch.device(slot) for slot in slots]
    value = row.read(devices)
    elsewhere = torch.Stream(devices[1])
    torch.accelerator.set_stream(elsewhere)
    end = row.hold(value, devices, devices[1])
    assert torch.accelerator.current_stream(devices[1]) == side_streams[devices[1]]
    end()
    assert torch.accelerator.current_stream(devices[1]) == elsewhere


@pytest.mark.devices("sim")
def test_what_the_caller_has_waited_for_the_replicas_know_on_any_stream(slots: list, root: torch.device) -> None:
    """The caller also knows the streams that a replica has waited for."""
    devices = [torch.device(slot) for slot in slots]
    x = torch.ones(len(slots), 2, device=root)
    DataParallel(nn.Identity(), slots)(x)  # so that its worker threads exist, with the waits that they know
    tables = {}
    for device in devices:
        with (side := torch.Stream(device)):
            tables[device] = torch.full((2,), 3.0, device=device)
        side.synchronize()
    made = {}

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with (fresh := torch.Stream(x.device)):  # only the host's wait orders this stream
                made[x.device] = tables[x.device] * 2
            fresh.synchronize()
            return x * 1

    DataParallel(Uses(), slots)(x)
    assert {*made} == {*devices}
    for device, tensor in made.items():
        with torch.Stream(device):
            tensor.add_(1)
        torch.accelerator.synchronize(device)
        assert tensor.tolist() == [7, 7]


def test_sparse_gradients_and_gradients_of_gradients(slots: list, root: torch.device, side_streams: dict) -> None:
    """Their sums are on the caller's streams."""
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, sparse=True).double().to(root)
    rows = torch.arange(13).remainder(5).to(root)
    wrapped = DataParallel(table, slots)
    (expected,) = torch.autograd.grad(table(rows).square().sum(), [table.weight])
    for times in (1, 2, 3):
        wrapped(rows).square().sum().backward()
        torch.testing.assert_close(table.weight.grad.to_dense(), times * expected.to_dense(), rtol=0, atol=1e-9)
    layer = nn.Linear(3, 2).double().to(root)
    x = torch.randn(13, 3, dtype=torch.float64).to(root)

    def second(call: nn.Module) -> list[Tensor]:
        first = torch.autograd.grad(call(x).pow(3).sum(), [*layer.parameters()], create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in first), [*layer.parameters()]))

    for ours, theirs in zip(second(DataParallel(layer, slots)), second(layer), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
