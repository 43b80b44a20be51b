"""Parts of a replica that somebody holds stay as they are in later calls; parts that nobody holds are freed."""

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dataparallel import DataParallel
from freed_later import freed_later
from memory import allocated
from nets import HELD, HOLDS

# For each thing that can be held, how to get a parameter's value from it.
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "a parameter": (lambda r: r.linear.weight, lambda held: held),
    "a buffer": (lambda r: r.shift, lambda held: held),
    "the replica": (lambda r: r, lambda held: held.linear.weight),
    "a child": (lambda r: r.linear, lambda held: held.weight),
    "a method": (lambda r: r.linear.forward, lambda held: held.__self__.weight),
    "a state dict": (lambda r: r.state_dict(), lambda held: held["linear.weight"]),
}


@pytest.mark.parametrize(("hold", "value"), WAYS.values(), ids=WAYS.keys())
def test_what_is_held_keeps_its_value(hold, value, net, call, slots) -> None:
    call()
    call()
    HOLDS.append(hold)
    call()
    HOLDS.clear()
    # Slot 0 shares the memory of the source, as on one device.
    values = [(value(held), value(held).clone()) for held in HELD if torch.device(value(held).device).index]
    assert len(values) == sum(bool(torch.device(slot).index) for slot in slots)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data = tensor.data * 3
    for _ in range(2):
        call()
        for tensor, before in values:
            assert torch.equal(tensor, before)
    for held in HELD:
        assert value(held).shape[0] > 0


def test_a_parameter_that_is_returned(slots, root) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            return self.weight, [self.weight.view(-1)]

    module = Returns().to(root)
    wrapped = DataParallel(module, slots)
    x = torch.ones(len(slots), 1, device=root)
    with torch.no_grad():
        outputs = []
        for step in range(3):
            module.weight.data.fill_(step)
            outputs.append(wrapped(x))
    for step, (whole, (flat,)) in enumerate(outputs):
        assert {*whole.view(-1).tolist(), *flat.tolist()} == {step}


@pytest.mark.parametrize("key", [lambda m: m, lambda m: m.linear.weight], ids=["a module", "a parameter"])
def test_what_is_cached_by_weak_reference_is_not_found_again(key, slots, root, x) -> None:
    cache = WeakIdKeyDictionary()

    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if key(self) not in cache:
                cache[key(self)] = self.linear.weight.t().clone()
            return x @ cache[key(self)]

    module = Caches().double().to(root)
    wrapped = DataParallel(module, slots)
    with torch.no_grad():
        wrapped(x)
        wrapped(x)
        module.linear.weight.zero_()
        assert not wrapped(x).any()


@freed_later
def test_activations_are_not_held_after_a_call(call, no_collector) -> None:
    left: list[weakref.ref[Tensor]] = []

    def leave(replica: Any) -> None:
        for place in (replica.inner, replica.linear.weight):
            place.act = torch.ones(4, device=replica.shift.device)
            left.append(weakref.ref(place.act))
        grad = replica.fixed.grad = torch.ones_like(replica.fixed)
        replica.fixed.data = torch.ones_like(replica.fixed)
        left.append(weakref.ref(grad))

    HOLDS.append(leave)
    call()
    call()
    assert len(left) == 18
    assert not any(act() is not None for act in left)
    HOLDS.append(lambda replica: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        call()
    del caught
    assert len(left) > 18
    assert not any(act() is not None for act in left)


def test_copies_of_a_wrapper_keep_nothing(net, wrapped, call, x) -> None:
    expected = call()
    call()
    file = io.BytesIO()
    with wrapped.options.frozen():
        torch.save(wrapped, file)
        copies = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))]
    file.seek(0)
    with torch.no_grad():
        net.linear.weight.zero_()
        for other in (*copies, torch.load(file, weights_only=False)):
            for _ in range(2):
                torch.testing.assert_close(other(x), expected)
            other.module.linear.weight.zero_()  # a frozen copy would not see it
            torch.testing.assert_close(other(x), other.module(x))


@pytest.mark.devices("sim")
@pytest.mark.slots(8)
def test_bytes(net, slots, x, without_graph) -> None:
    """Outside of `frozen` no call leaves anything on the devices: with a graph, without one, or failed."""
    before = allocated()
    wrapped = DataParallel(net, slots)

    def call() -> None:
        with without_graph():
            wrapped(x)

    call()
    assert allocated() == before
    wrapped(x)
    assert allocated() == before
    HOLDS.append(lambda replica: setattr(replica.linear.weight, "act", torch.ones(99, device=replica.shift.device)))
    HOLDS.append(lambda replica: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        call()
    del caught
    assert allocated() == before
    HOLDS.clear()
    with wrapped.options.frozen():
        assert allocated() == before
        call()
        frozen = allocated()
        call()
        assert allocated() == frozen != before
    assert allocated() == before
