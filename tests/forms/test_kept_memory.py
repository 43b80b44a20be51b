"""If ``forward`` gives a tensor other memory, the next call finds the former memory and the source's values."""

import itertools
from collections.abc import Callable

import pytest
import torch
from kept import Branched, numbers, settled, tensors_of, with_kept_replicas
from loops import adamw, assert_same_loop, mean_square, waits
from torch import Tensor, nn

from clocked import counted
from dataparallel import comm
from dataparallel.testing.cases import seeded


def set_(tensor: Tensor) -> None:
    tensor.set_(tensor.detach().clone())


def data(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def move(tensor: Tensor) -> None:
        tensor.data = make(tensor.data)

    return move


def not_of(source: Tensor, move: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    """``move`` for copies of ``source`` only. It is found by its number: a reference would become the replica's."""
    number = id(source)

    def move_copy(tensor: Tensor) -> None:
        if id(tensor) != number:
            move(tensor)

    return move_copy


MOVES: dict[str, Callable[[Tensor], None]] = {
    "set_": set_,
    ".data =": data(Tensor.clone),
    ".data = a neighbour": data(lambda old: old.new_zeros(3, *old.shape)[1]),
    ".data = transposed": data(Tensor.t),
    ".data = a part": data(lambda old: old[:1]),
    ".data = another dtype": data(Tensor.float),
    ".data = the same bytes as another dtype": data(lambda old: old.view(torch.complex64)),
    ".data = nothing": data(lambda old: old.new_empty(0)),
}
TENSORS = ["linear.weight", "tied.weight", "frozen", "single", "unused", "shift"]


class Moved(nn.Module):
    """Uses a tensor, then gives it other memory, and notes each replica's value before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.single, self.unused = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("shift", torch.randn(4, 4))
        self.name = ""
        self.move: Callable[[Tensor], None] = lambda tensor: None
        self.seen: list[dict[str, Tensor]] = []

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}

    def forward(self, x: Tensor) -> Tensor:
        tensors = self.tensors()
        self.seen.append({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
        y = self.tied(torch.tanh(self.linear(x) @ self.frozen)) @ self.single + self.shift[0]
        if self.name:
            with torch.no_grad():
                self.move(tensors[self.name])
        return y


@pytest.fixture
def moved(root: torch.device) -> Moved:
    torch.manual_seed(0)
    with torch.device(root):  # moving a module to a simulated device unties its weights
        module = Moved().double()
    module.single.mark = "travels singly"
    return module


def assert_replicas_saw(moved: Moved, count: int) -> None:
    expected = {name: tensor.detach().cpu() for name, tensor in moved.tensors().items()}
    assert len(moved.seen) == count
    for seen in moved.seen:
        assert seen.keys() == expected.keys()
        for name, tensor in expected.items():
            assert seen[name].dtype == tensor.dtype, name
            assert seen[name].stride() == tensor.stride(), name
            assert torch.equal(seen[name], tensor), name
    moved.seen.clear()


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("how", MOVES)
def test_every_replica_has_the_sources_values_at_each_call(
    moved: Moved, slots: list, root: torch.device, how: str, name: str
) -> None:
    if name == "shift":  # slot 0's buffer is the source's: what happens to it there is no business of the replicas
        moved.move = not_of(moved.shift, MOVES[how])
    else:
        moved.move = MOVES[how]
    moved.name = name
    wrapped = with_kept_replicas(moved, slots)
    x = torch.ones(len(slots), 4, dtype=torch.float64, device=root)
    for context in (torch.enable_grad, torch.enable_grad, torch.enable_grad, torch.no_grad, torch.inference_mode) * 2:
        with torch.no_grad():
            for tensor in moved.tensors().values():
                tensor.add_(1)
        with context():
            output = wrapped(x)
        assert_replicas_saw(moved, len(slots))
        if output.requires_grad and how == ".data =":  # on one device too others break the graph
            output.sum().backward()


def test_a_buffer_that_moves_on_slot_0_moves_in_the_module(moved: Moved, slots: list, root: torch.device) -> None:
    """As on one device; the other replicas get its values at the next call."""
    moved.name, moved.move = "shift", data(lambda old: old + 1)
    wrapped = with_kept_replicas(moved, slots)
    x = torch.ones(len(slots), 4, dtype=torch.float64, device=root)
    for _ in range(3):
        before = moved.shift.clone()
        wrapped(x)
        assert torch.equal(moved.shift, before + 1)
        moved.name = ""
        moved.seen.clear()
        wrapped(x)
        assert_replicas_saw(moved, len(slots))
        moved.name = "shift"


def test_memory_that_is_gone_is_made_anew(moved: Moved, slots: list, root: torch.device) -> None:
    moved.name, moved.move = "shift", not_of(moved.shift, lambda tensor: tensor.untyped_storage().resize_(0))
    wrapped = with_kept_replicas(moved, slots)
    x = torch.ones(len(slots), 4, dtype=torch.float64, device=root)
    for _ in range(4):
        wrapped(x)
        assert_replicas_saw(moved, len(slots))


def test_buffers_of_their_own_keep_what_forward_gave_to_them(moved: Moved, slots: list, root: torch.device) -> None:
    """Buffers that are not sent at each call keep their values, whether they get other memory or change in place."""
    source = moved.shift
    moved.name, moved.move = "shift", not_of(source, data(lambda old: old + 1))
    wrapped = with_kept_replicas(moved, slots, broadcast_buffers=False)
    x = torch.ones(len(slots), 4, dtype=torch.float64, device=root)
    for _ in range(2):
        wrapped(x).sum().backward()
    for calls in range(1, 4):
        moved.seen.clear()
        wrapped(x)
        added = sorted(float((seen["shift"] - source.cpu()).mean()) for seen in moved.seen)
        assert added == pytest.approx([0.0] + [float(calls)] * (len(slots) - 1))


class Flattened(nn.Module):
    """An LSTM that lays its weights one after the other at each forward, as ``flatten_parameters`` does on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True, bidirectional=True), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.lstm._flat_weights
        with torch.no_grad():
            flat = torch.cat([weight.flatten() for weight in weights])
            for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
                weight.set_(part.view(weight.shape))
        return self.head(self.lstm(x)[0])


@pytest.mark.slots(3, long=[2, 8])
def test_an_lstm_that_flattens_its_parameters_trains_as_on_one_device(slots, root):
    def loop(net):
        optimizer = adamw(net)
        outputs = []
        for step, micro in itertools.product(range(4), range(2)):
            generator = torch.Generator().manual_seed(2 * step + micro)
            x = torch.randn(2 * len(slots) + 1, 3, 4, dtype=torch.float64, generator=generator).to(root)
            with waits(net) if micro == 0 else torch.enable_grad():
                outputs.append(net(x))
                mean_square(outputs[-1]).backward()
            if micro:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    outputs.append(net.eval()(x))
                net.train()
        return outputs

    assert_same_loop(loop, slots, seeded(Flattened))


def test_copies_that_are_in_several_pieces_are_filled_one_by_one(
    net: Branched, twin: Branched, slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another transport may put them elsewhere."""

    def in_pieces(tensors: list[Tensor], devices: list, *args: object, **kwargs: object) -> list[list[Tensor]]:
        pieces = {device: [tensor.to(device) for tensor in tensors] for device in devices}
        return [list(pieces[device]) for device in devices]

    monkeypatch.setattr(comm, "broadcast_coalesced", in_pieces)
    x = numbers(root, 2 * len(slots) + 1)
    wrapped = settled(net, slots, x)
    monkeypatch.undo()
    for module in (net, twin):
        with torch.no_grad():
            module.second.weight.mul_(2)
    torch.testing.assert_close(wrapped(x), twin(x), rtol=0, atol=1e-9)


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.slots(8)
@pytest.mark.parametrize("trained", [False, True])
def test_a_forward_sends_the_values_in_a_few_launches(trained: bool, slots: list, root: torch.device) -> None:
    """At most three for each slot and bucket, whatever the number of tensors, also where nothing was ever trained."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100))).to(root)
    wrapped = with_kept_replicas(model, slots)
    tensors_of(wrapped)._first_bytes = tensors_of(wrapped)._cap_bytes = 2**20
    x = torch.ones(len(slots), 2, device=root)
    for _ in range(2):
        if trained:
            wrapped(x).sum().backward()
    with torch.set_grad_enabled(trained):
        wrapped(x)
    with torch.set_grad_enabled(trained), counted() as counts:
        wrapped.options.kept.replicas(model, [torch.device(slot) for slot in slots], 2**20)
    assert sum(counts.launches) <= 3 * len(slots)
