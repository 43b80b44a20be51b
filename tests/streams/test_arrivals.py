"""Parameters travel while replicas compute, and each module waits for its own bucket only.

The simulated devices' clocks tell what a stream has waited for: to touch memory too early is a race.
"""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from dataparallel import DataParallel, comm
from dataparallel.composable import replicate
from dataparallel.modules.registry import ParameterRegistry
from dataparallel.streams.arrivals import Arrival, Arrivals, parameter_stream
from dataparallel.streams.current import Event, streams_set
from dataparallel.testing import isolated_slots
from spare_streams import spare_stream
from steps import build, gradients, numbers

pytestmark = pytest.mark.devices("sim")

WIDTH = 8
ARRANGEMENTS = {"distinct": [0, 1, 2], "duplicates": [0, 1, 0, 1], "isolated": [0, 0, 0]}


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have compiled something in this process. Nothing here is compiled."""
    monkeypatch.setattr("dataparallel._torch.is_compiler_in_use", lambda: False)


@pytest.fixture(params=[*ARRANGEMENTS])
def slots(request: pytest.FixtureRequest) -> Iterator[list]:
    devices = [torch.device("sim", index) for index in ARRANGEMENTS[request.param]]
    if request.param == "isolated":
        with isolated_slots():
            yield devices
    else:
        yield devices


@pytest.fixture(params=["DataParallel", "replicate"])
def form(request: pytest.FixtureRequest) -> Callable[..., nn.Module]:
    """A function that wraps a module so that each parameter is a bucket."""

    def wrap(model: nn.Module, slots: list) -> nn.Module:
        if request.param == "DataParallel":
            return DataParallel(model, slots, bucket_cap_mb=1e-9, workers=len(slots))
        return replicate(model, devices=slots, bucket_cap_mb=1e-9, first_bucket_mb=1e-9)

    return wrap


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(root)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class Net(nn.Module):
    """Three layers. ``does`` is called in each replica's forward: with the replica, between the layers."""

    def __init__(self, does: Callable[[nn.Module], object] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale, self.constant = Scale(), Scale().requires_grad_(False)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if self.does is not None:
            self.does(self)
        return self.scale(self.last(self.second(x).tanh()))


def steps(model: nn.Module, call: nn.Module, x: Tensor, count: int = 3) -> None:
    """Training steps, so that persistent replicas know the order of gradients and are refreshed."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(count):
        optimizer.zero_grad()
        call(x).square().sum().backward()
        optimizer.step()


def trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def silently(module: nn.Module, name: str) -> Tensor:
    """A parameter of a replica, without waiting for it."""
    return dict.__getitem__(module._parameters, name)


_others: dict[tuple[torch.device, int], torch.Stream] = {}


def other_stream(device: torch.device, number: int) -> torch.Stream:
    """A stream of the test. Each is made once."""
    if (device, number) not in _others:
        here = [stream for (at, _), stream in _others.items() if at == device]
        _others[device, number] = spare_stream(device, *here)
    return _others[device, number]


class Peek:
    """Reads the last layer on another stream, which has only waited for what the slot's stream has done so far.

    ``waits``: it waits for the parameters' side stream too.
    """

    def __init__(self, waits: bool) -> None:
        self.waits, self.peeked = waits, 0
        self.errors: list[tuple[torch.device, str]] = []
        self.seen: set[int] = set()

    def __call__(self, net: nn.Module) -> None:
        weight = silently(net.last, "bias")
        if weight.data_ptr() in self.seen:  # another slot on this device, whose stream has read it
            return
        self.seen.add(weight.data_ptr())
        here = torch.accelerator.current_stream(weight.device)
        stream = other_stream(weight.device, len(self.seen))
        stream.wait_stream(here)
        if self.waits:
            stream.wait_stream(parameter_stream(weight.device))
        self.peeked += 1
        try:
            with torch.no_grad(), streams_set({weight.device: stream}):
                (weight.data + 0).sum()
        except RuntimeError as error:
            self.errors.append((weight.device, str(error)))
        here.wait_stream(stream)


@pytest.mark.parametrize("waits", [False, True])
def test_the_first_layer_does_not_wait_for_the_last_bucket(
    waits: bool, slots: list, root: torch.device, x: Tensor, form: Callable
) -> None:
    """A stream that has waited for the first layer on a slot races with the last copy into that slot's memory."""
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    peek = model.does = Peek(waits)
    for grad in (True, False):
        peek.seen.clear()
        with torch.set_grad_enabled(grad):
            call(x)
    memories = len(slots) if len({*slots}) == 1 else len({*slots})
    assert peek.peeked == 2 * memories
    assert len(peek.errors) == (0 if waits else 2 * (memories - 1)), peek.errors
    assert all(message.startswith("race") for _, message in peek.errors)


def test_the_sources_parameters_are_read_before_slot_0_writes_to_them(
    slots: list, root: torch.device, x: Tensor, form: Callable
) -> None:
    """All replicas write; slot 0's write is the source's."""

    def write(net: nn.Module) -> None:
        with torch.no_grad():
            net.last.bias.mul_(1)
            net.second.weight.data.mul_(1)

    model = Net(write).double().to(root)
    call = form(model, slots)
    for _ in range(3):
        with torch.no_grad():
            call(x)


def test_a_removed_wait_is_a_race(
    slots: list, root: torch.device, x: Tensor, form: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    monkeypatch.setattr(Arrival, "make_wait", lambda self, stream: self.waited.add(stream))
    with pytest.raises(RuntimeError, match="race"):
        call(x)


def test_a_call_that_ends_without_waiting_is_a_race(
    slots: list, root: torch.device, x: Tensor, form: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that leaves the last layer out: only the end of the call waits for its copies."""

    class Half(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    model = Half().double().to(root)
    call = form(model, slots)

    def step() -> None:
        call(x).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1)

    for _ in range(3):
        step()

    def step_and_check() -> None:
        step()
        torch.sim.check_clocks()

    monkeypatch.setattr(Arrivals, "end", lambda self: self._held.clear())
    with pytest.raises(RuntimeError, match=r"race|freed too early"):
        step_and_check()
    for device in {*slots}:
        torch.accelerator.current_stream(device).wait_stream(parameter_stream(device))


def test_side_streams_wait_for_the_computing_streams(
    slots: list, root: torch.device, x: Tensor, form: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the copies would read parameters that the optimizer has not written yet."""
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)
    make_wait = Event.make_wait
    monkeypatch.setattr("dataparallel.streams.arrivals.Event.make_wait", lambda self, stream: None)
    with pytest.raises(RuntimeError, match="race"):
        call(x)
    monkeypatch.setattr("dataparallel.streams.arrivals.Event.make_wait", make_wait)
    for device in {*slots}:
        torch.accelerator.current_stream(device).wait_stream(parameter_stream(device))


@pytest.mark.parametrize("route", ["star", "tree", "chain"])
@pytest.mark.parametrize("bucket_mb", [1e-9, 25])
def test_values_and_gradients_are_those_of_one_device(
    bucket_mb: float, route: str, slots: list, root: torch.device, x: Tensor
) -> None:
    """A bucket that is large enough goes along a chain in pieces."""
    model, twin = Net().double().to(root), Net().double().to(root)
    other = Net().double().to(root)
    with comm.using(route=route):
        steps(other, replicate(other, devices=slots, bucket_cap_mb=bucket_mb, first_bucket_mb=bucket_mb), x, 4)
        steps(model, DataParallel(model, slots, bucket_cap_mb=bucket_mb), x, 4)
    steps(twin, twin, x, 4)
    for one, two, theirs in zip(model.parameters(), other.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, theirs, rtol=0, atol=1e-12)
        torch.testing.assert_close(two, theirs, rtol=0, atol=1e-12)


def test_inference_between_steps_has_the_values_of_one_device(
    slots: list, root: torch.device, x: Tensor, form: Callable, without_graph: Callable
) -> None:
    model, twin = Net().double().to(root), Net().double().to(root)
    call = form(model, slots)
    for _ in range(4):
        steps(model, call, x, 1)
        steps(twin, twin, x, 1)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        with without_graph():
            torch.testing.assert_close(call(x), twin(x), rtol=0, atol=1e-12)


def use(values: Any) -> None:
    """Computes with tensors."""
    for value in values:
        if value is not None:
            (value.detach() * 2).sum()


def on_two_streams(net: nn.Module) -> None:
    """The second stream has waited for nothing but the work before the lookups."""
    device = silently(net.first, "bias").device
    here, other = torch.accelerator.current_stream(device), other_stream(device, 0)
    other.wait_stream(here)
    use([net.last.weight])
    with streams_set({device: other}):
        use([net.last.weight, net.last.bias])
    here.wait_stream(other)


def swapped(net: nn.Module) -> None:
    new = {name: value.detach() * 2 for name, value in net.last.named_parameters()}
    torch.func.functional_call(net.last, new, torch.zeros(1, WIDTH, dtype=torch.float64, device=new["bias"].device))
    use([net.last.weight])


def replaced(net: nn.Module) -> None:
    net.last.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64, device=net.first.bias.device))
    use([net.last.weight])


def deleted(net: nn.Module) -> None:
    weight = silently(net.second, "weight").detach()
    del net.second.weight
    torch.empty_like(weight).fill_(1)
    net.second.register_parameter("weight", nn.Parameter(torch.ones_like(weight)))
    use([net.second.weight])


def looked_up_in_a_thread(net: nn.Module) -> None:
    thread = threading.Thread(target=lambda: use([net.last.weight, net.last.bias]))
    thread.start()
    thread.join()


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "an attribute": lambda net: use([net.last.weight]),
    "twice": lambda net: use([net.last.weight, net.last.weight]),
    "an item": lambda net: use([net.last._parameters["weight"]]),
    "items": lambda net: use(value for _, value in net.last._parameters.items()),
    "values": lambda net: use(net.last._parameters.values()),
    "iteration": lambda net: use(dict.__getitem__(net.last._parameters, name) for name in net.last._parameters),
    "get": lambda net: use([net.last._parameters.get("weight"), net.last._parameters.get("nothing")]),
    "pop": lambda net: use([net.last._parameters.setdefault("weight", net.last._parameters.pop("weight"))]),
    "popitem": lambda net: use([net.last._parameters.setdefault(*net.last._parameters.popitem())]),
    "copy": lambda net: use(net.last._parameters.copy().values()),
    "copy.copy": lambda net: use(copy.copy(net.last._parameters).values()),
    "deepcopy": lambda net: use(copy.deepcopy(net.constant._parameters).values()),
    "a pickle": lambda net: use(pickle.loads(pickle.dumps(net.last._parameters)).values()),
    "dict": lambda net: use(dict(net.last._parameters).values()),
    "keywords": lambda net: use((lambda **named: named)(**net.last._parameters).values()),
    "a union": lambda net: use((net.last._parameters | {}).values()),
    "a union from the right": lambda net: use(({} | net.last._parameters).values()),
    "update": lambda net: use(_updated(net.last._parameters).values()),
    "repr": lambda net: repr(net.last._parameters),
    "equality": lambda net: net.scale._parameters == {"value": torch.ones_like(silently(net.scale, "value"))},
    "parameters": lambda net: use(net.parameters()),
    "named_parameters": lambda net: use(value for _, value in net.named_parameters()),
    "state_dict": lambda net: use(net.state_dict().values()),
    "deepcopy of a module": lambda net: use(copy.deepcopy(net.constant).parameters()),
    "functional_call": swapped,
    "replaced": replaced,
    "deleted": deleted,
    "two streams": on_two_streams,
    "a thread": looked_up_in_a_thread,
}


def _updated(registry: dict) -> dict:
    new: dict = {}
    new.update(registry)
    return new


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_parameter_waits_for_it(
    way: str, slots: list, root: torch.device, x: Tensor, form: Callable
) -> None:
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    model.does = WAYS[way]
    # Copying a parameter of a replica is refused where it is no leaf.
    refused = pytest.raises(RuntimeError, match="cannot deepcopy") if "deepcopy" in way else nullcontext()
    for _ in range(2):
        with torch.no_grad(), nullcontext() if isinstance(call, DataParallel) else refused:
            call(x)
    with refused:
        call(x).sum().backward()


def test_registries_copy_to_plain_dicts(root: torch.device) -> None:
    found: list = []

    def note(net: nn.Module) -> None:
        registry = net.last._parameters
        assert isinstance(registry, ParameterRegistry)
        assert list(registry) == list(registry.keys()) == ["weight", "bias"]
        assert len(registry) == 2
        assert "weight" in registry
        assert "x" not in registry
        with pytest.raises(KeyError):
            registry["x"]
        assert registry.get("x", 3) == 3
        copies = [registry.copy(), copy.copy(registry), dict(registry), registry | {}, {} | registry, {**registry}]
        copies += [copy.deepcopy(registry), pickle.loads(pickle.dumps(registry))]
        found.extend(map(type, copies))

    slots = [torch.device("sim", index) for index in (0, 1)]
    model = Net(note).double().to(slots[0])
    with torch.no_grad():
        DataParallel(model, slots)(torch.ones(4, WIDTH, dtype=torch.float64, device=slots[0]))
    assert found == [dict] * 16


@pytest.mark.parametrize("why", ["one slot's device", "serial", "the stage alone", "frozen", "the compiler"])
def test_where_nothing_is_late_registries_are_plain_dicts(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[type] = set()
    root = torch.device("sim", 0)
    slots = [root, torch.device("sim", 0 if why == "one slot's device" else 1)]
    model = Net(lambda net: found.add(type(net.last._parameters))).double().to(root)
    x = torch.ones(4, WIDTH, dtype=torch.float64, device=root)
    if why == "the compiler":
        monkeypatch.setattr("dataparallel._torch.is_compiler_in_use", lambda: True)
    if why == "the stage alone":
        dp.parallel_apply(dp.replicate(model, slots), [x, x.to(slots[1])], devices=slots)
    elif why == "frozen":
        with torch.no_grad(), DataParallel(model, slots).frozen() as frozen:
            frozen(x)
    else:
        DataParallel(model, slots, serial=why == "serial")(x)
    assert found == {dict}


def test_several_threads_call_one_wrapper(slots: list, root: torch.device, x: Tensor, form: Callable) -> None:
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(3):
                call(x).sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_that_share_persistent_replicas_do_not_write_beside_each_other(
    slots: list, root: torch.device, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second thread's call refreshes memory that the first thread's backward still reads."""
    model = Net().double().to(root)
    call = replicate(model, devices=slots, bucket_cap_mb=1e-9, first_bucket_mb=1e-9)
    steps(model, call, x)
    inside, done = threading.Event(), threading.Event()

    def meet(net: nn.Module) -> None:
        if threading.current_thread().name == "second" or silently(net.first, "bias").device != root:
            return
        if first_call.is_set() and not inside.is_set():
            inside.set()
            done.wait(20)

    def second() -> None:
        inside.wait(20)
        errors.extend(raised_by(lambda: call(x)))
        done.set()

    errors: list[BaseException] = []
    first_call = threading.Event()
    model.does = meet
    thread = threading.Thread(target=second, name="second")
    thread.start()
    first_call.set()
    errors.extend(raised_by(lambda: call(x).sum().backward()))
    thread.join()
    assert not errors, errors


def raised_by(task: Callable[[], object]) -> list[BaseException]:
    try:
        task()
    except RuntimeError as error:
        return [error]
    return []


def copy_of(model: nn.Module) -> nn.Module:
    twin = Net().double().to(model.first.weight.device)
    twin.load_state_dict(model.state_dict())
    return twin


def test_two_forwards_before_one_backward(slots: list, root: torch.device, x: Tensor, form: Callable) -> None:
    model = Net().double().to(root)
    twin = copy_of(model)
    call = form(model, slots)
    for _ in range(3):
        model.zero_grad()
        (call(x).square().sum() + call(2 * x).square().sum()).backward()
    (twin(x).square().sum() + twin(2 * x).square().sum()).backward()
    for ours, theirs in zip(trained(model), trained(twin), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_inside_recomputes_with_lookups(
    use_reentrant: bool, slots: list, root: torch.device, form: Callable
) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    model = Checkpointed().double().to(root)
    twin = copy_of(model)
    call = form(model, slots)
    x = torch.randn(8, WIDTH, dtype=torch.float64).to(root).requires_grad_()
    for _ in range(3):
        model.zero_grad()
        call(x).square().sum().backward()
    twin(x.detach()).square().sum().backward()
    for ours, theirs in zip(trained(model), trained(twin), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


def test_a_replica_that_fails_leaves_no_race(slots: list, root: torch.device, x: Tensor, form: Callable) -> None:
    def fail(net: nn.Module) -> None:
        if silently(net.last, "bias").device != root or len({*slots}) == 1:
            raise ArithmeticError("no")

    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    model.does = fail
    with pytest.raises(ArithmeticError):
        call(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)
    model.does = None
    steps(model, call, x)


def test_a_failure_while_copies_are_sent_leaves_no_race(
    slots: list, root: torch.device, x: Tensor, form: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    with monkeypatch.context() as patch:
        patch.setattr(Arrivals, "expect", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call(x)
    steps(model, call, x)


class Odd(nn.Module):
    """Reads parameters past the registry."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.script = torch.jit.script(nn.Linear(WIDTH, WIDTH))
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.old = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.list = nn.ParameterList([torch.ones(WIDTH) for _ in range(2)])
        self.dict = nn.ParameterDict({"a": torch.ones(WIDTH)})
        self.tail = nn.Linear(WIDTH, WIDTH)
        self.held = [self.tail.weight]
        self.function = lambda x: x * held_bias
        held_bias = self.tail.bias
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.tail.weight
        self.register_buffer("shift", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(x) @ self.held[0] + self.shift
        x = self.rnn(x[:, None])[0][:, 0]
        x = self.old(self.linear(self.script(x))) * self.dict["a"]
        for scale in self.list:
            x = x * scale
        return self.tied(self.tail(self.tail(x)))


@pytest.mark.filterwarnings("ignore")
def test_what_is_read_past_the_registry_is_there_before_the_replica_starts(
    slots: list, root: torch.device, x: Tensor, form: Callable
) -> None:
    model, twin = Odd().double().to(root), Odd().double().to(root)
    model.held, twin.held = [model.tail.weight], [twin.tail.weight]
    twin.load_state_dict(model.state_dict())
    call = form(model, slots)
    for _ in range(3):
        steps(model, call, x, 1)
        steps(twin, twin, x, 1)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            torch.testing.assert_close(call(x), twin(x), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_without_that_wait_it_is_a_race(
    slots: list, root: torch.device, x: Tensor, form: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Arrivals.launch
    monkeypatch.setattr(Arrivals, "launch", lambda self, broadcasts, at_once: launch(self, broadcasts, set()))
    model = Odd().double().to(root)
    model.held = [model.tail.weight]
    call = form(model, slots)
    with pytest.raises(RuntimeError, match="race"):
        call(x)


def test_on_the_callers_streams_too(slots: list, side_streams: dict, form: Callable) -> None:
    root = torch.device(slots[0])
    model, x = build(root), numbers(root)
    expected = gradients(model(x).square().sum(), model, x)
    call = form(model, slots)
    for _ in range(3):
        for ours, theirs in zip(gradients(call(x).square().sum(), model, x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
