"""Isolated slots on one accelerator have their own streams, which are ordered against the caller's.

Clocks show a missing order in every run. Here each order is taken out once, to see that they do.
"""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, parallel_apply
from dataparallel.autograd import bucket_gradients
from dataparallel.autograd.gradient_streams import GradientStreams, Made, side_stream
from dataparallel.batch_types import register_batch
from dataparallel.comm import using
from dataparallel.comm.settings import Settings, held
from dataparallel.streams.isolated import IsolatedStream, isolated_streams
from dataparallel.testing import isolated_slots
from dataparallel.testing.pytest import settle

pytestmark = pytest.mark.devices("sim", "cuda")
with_clocks = pytest.mark.devices("sim", "stand-in")


@pytest.fixture
def slots(root: torch.device) -> list[torch.device]:
    return [root] * 3


@pytest.fixture(autouse=True)
def isolation() -> Iterator[None]:
    with isolated_slots():
        yield


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Stream] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.accelerator.current_stream(x.device))
        return x * 2


@pytest.mark.parametrize("how", [{}, {"workers": 3}, {"serial": True}], ids=str)
def test_each_replica_has_a_stream_of_its_own(how: dict, slots: list, root: torch.device) -> None:
    here = torch.accelerator.current_stream(root)
    net = Looks()
    model = DataParallel(net, slots, **how)
    for _ in range(3):
        assert model(torch.ones(3, 2, device=root)).sum() == 12
    assert here in net.seen
    assert all(net.seen.count(stream) == 3 for stream in net.seen)  # the same three in every call
    assert torch.accelerator.current_stream(root) == here


def test_each_device_has_its_first_slot_on_the_callers_stream(make_slots: Callable) -> None:
    devices = [torch.device(device) for device in dict.fromkeys(make_slots(2))]
    slots = [device for device in devices for _ in range(2)]
    own = isolated_streams(slots)
    assert [*own] == [slot for slot, device in enumerate(slots) if device in slots[:slot]]
    for slot, one in own.items():
        assert one.stream.device == slots[slot]
        assert one.stream != torch.accelerator.current_stream(slots[slot])


def test_other_calls_have_no_such_streams(slots: list) -> None:
    with held(Settings()):
        assert isolated_streams(slots) == {}
    assert isolated_streams([torch.device("cpu")] * 3) == {}


def test_a_replica_that_calls_a_wrapper_keeps_its_stream_to_itself(slots: list, root: torch.device) -> None:
    with isolated_streams(slots)[1].stream:
        mine = torch.accelerator.current_stream(root)
        assert mine not in [own.stream for own in isolated_streams(slots).values()]


# Orders


def build(root: torch.device) -> nn.Module:
    """The first layer looks no parameter up: a lookup waits for the copies, and so for the caller."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Tanh(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double().to(root)


def train(slots: list, root: torch.device) -> None:
    net = build(root)
    model = DataParallel(net, slots)
    for _ in range(2):
        model(torch.ones(9, 4, dtype=torch.float64, device=root)).square().sum().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
            model(torch.ones(9, 4, dtype=torch.float64, device=root))
    gc.collect()
    settle()


@with_clocks
def test_a_training_has_every_order(slots: list, root: torch.device) -> None:
    train(slots, root)


@pytest.mark.parametrize(
    "guard",
    [
        pytest.param("wait_for_caller", marks=with_clocks),
        pytest.param("make_caller_wait", marks=with_clocks),
        # Simulated devices look at memory when it is freed, the stand-in when it is used next.
        pytest.param("record_inputs", marks=pytest.mark.devices("sim")),
    ],
)
def test_without_one_of_them_the_clocks_raise(
    guard: str, slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IsolatedStream, guard, lambda self, *objects: None)
    try:
        with pytest.raises(RuntimeError, match="freed too early" if guard == "record_inputs" else "race"):
            train(slots, root)
    finally:
        torch.accelerator.synchronize(root)


@pytest.fixture
def on_two_devices(make_slots: Callable) -> list[torch.device]:
    """Two slots on each of two devices."""
    devices = list(dict.fromkeys(make_slots(2)))
    if len(devices) < 2:
        pytest.skip("one device")
    return [device for device in devices for _ in range(2)]


class Recomputes(nn.Module):
    """Sums the gradients of its layers one by one, each before the previous layer's backward begins."""

    def __init__(self, root: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(root)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@with_clocks
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("flat", [True, False], ids=["in a buffer", "one by one"])
def test_gradients_that_leave_their_device_are_kept_until_then(
    flat: bool, guarded: bool, on_two_devices: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum reads them on another stream, and their memory then returns to the slot's stream."""
    if not flat:
        monkeypatch.setattr(bucket_gradients.Packing, "bucket_of", lambda self, grads: None)
    root = on_two_devices[0]
    loss = DataParallel(Recomputes(root), on_two_devices)(torch.ones(8, 4, device=root).requires_grad_()).sum()
    if guarded:
        loss.backward()
        return
    monkeypatch.setattr(GradientStreams, "_record", lambda *arguments: None)
    monkeypatch.setattr(Made, "receive", lambda made, tensors: made.make_wait(side_stream(made.stream.device)))
    try:
        with pytest.raises(RuntimeError, match="freed too early"):
            loss.backward()
    finally:
        for device in on_two_devices:
            torch.accelerator.synchronize(device)


class UsedByTheLast(nn.Module):
    """Uses its layer in replicas whose first value is above 3, so the root's slots have no gradient of it."""

    def __init__(self, root: torch.device) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).to(root)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x[0, 0] > 3 else x * 1


@with_clocks
@pytest.mark.parametrize("guarded", [True, False])
def test_gradients_are_added_on_their_device_after_the_slot_has_made_them(
    guarded: bool, on_two_devices: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a chain the other device adds its slots' gradients before anything is ordered against the root."""
    root = on_two_devices[0]
    x = torch.arange(8.0, device=root)[:, None].repeat(1, 4)
    with using(route="chain"):
        loss = DataParallel(UsedByTheLast(root), on_two_devices, workers=4)(x.requires_grad_()).sum()
    if guarded:
        loss.backward()
        return
    monkeypatch.setattr(Made, "make_wait", lambda made, stream: None)
    try:
        with pytest.raises(RuntimeError, match="race"):
            loss.backward()
    finally:
        for device in on_two_devices:
            torch.accelerator.synchronize(device)


@with_clocks
def test_a_checkpoint_around_the_wrapper_recomputes_on_the_same_streams(slots: list, root: torch.device) -> None:
    net = build(root).eval()
    model, x = DataParallel(net, slots), torch.ones(9, 4, dtype=torch.float64, device=root).requires_grad_()
    expected = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
    found = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), [x, *net.parameters()])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@with_clocks
@pytest.mark.parametrize("guarded", [True, False])
def test_outputs_are_kept_until_the_caller_has_used_them(guarded: bool, slots: list, root: torch.device) -> None:
    own = isolated_streams(slots)[1]
    own.wait_for_caller()
    with own.stream:
        made = torch.ones(8, device=root)
    own.note_end()
    own.make_caller_wait()
    if guarded:
        own.record_output({"output": [made]})
    _ = made * 2
    del made
    with own.stream:
        if guarded:
            torch.ones(8, device=root)
        else:
            with pytest.raises(RuntimeError, match="freed too early"):
                torch.ones(8, device=root)
    torch.accelerator.synchronize(root)


class Pair:
    """A batch that is no container."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


register_batch(Pair, size=len, split=lambda batch, sizes: [], merge=lambda batches: batches[0])


class Around(Tensor):
    @staticmethod
    def __new__(cls, inner: Tensor) -> "Around":
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: object, args: tuple, kwargs: dict) -> object:
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


STRUCTURES: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda t: t,
    "containers": lambda t: {"a": [(t,)]},
    "module": lambda t: nn.ParameterList([nn.Parameter(t)]),
    "sparse": lambda t: torch.sparse_coo_tensor(
        torch.zeros(1, 8, dtype=torch.int64, device=t.device), t, (1,), check_invariants=False
    ),
    "batch": Pair,
    "packed sequence": lambda t: nn.utils.rnn.PackedSequence(t, torch.ones(8, dtype=torch.int64)),
    "subclass": Around,
}


@with_clocks
@pytest.mark.parametrize("structure", STRUCTURES)
def test_inputs_are_kept_until_the_replica_has_used_them(structure: str, slots: list, root: torch.device) -> None:
    own = isolated_streams(slots)[1]
    memory = torch.ones(8, device=root)
    ready = torch.accelerator.current_stream(root).record_event()
    own.stream.wait_event(ready)
    own.record_inputs(STRUCTURES[structure](memory), {})
    with own.stream:
        memory * 2
    del memory
    gc.collect()
    torch.ones(8, device=root)
    settle()


def test_a_structure_that_contains_itself(slots: list, root: torch.device) -> None:
    circle: list = [torch.ones(2, device=root)]
    circle.append(circle)
    isolated_streams(slots)[1].record_inputs(circle)


def test_after_an_error_the_caller_has_waited_too(slots: list, root: torch.device) -> None:
    """The caller may use memory that the replicas have written to."""
    shared = torch.zeros(3, 2, device=root)

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            shared[int(x[0, 0])].add_(1)
            raise KeyError

    for _ in range(2):
        x = torch.arange(3.0, device=root)[:, None]
        with pytest.raises(KeyError):
            DataParallel(Fails(), slots, workers=3)(x)
        shared.mul_(1)


@with_clocks
def test_replicas_run_beside_each_other(slots: list, root: torch.device) -> None:
    """No replica is ordered after another one: each waits only for work from before the call."""
    shared = torch.zeros(2, device=root)

    def write(x: Tensor) -> Tensor:
        shared.add_(1)
        return x

    inputs = [(torch.ones(1, device=root),) for _ in slots]
    with pytest.raises(RuntimeError, match="race"):
        parallel_apply([write] * 3, inputs, devices=slots, serial=True)
    torch.accelerator.synchronize(root)
