"""Errors of replicas: which one is raised, what its notes say, and which memory is free afterwards."""

import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, parallel_apply
from memory import soon
from probe import Call

serial_or_not = pytest.mark.parametrize("serial", [False, True], ids=["workers", "serial"])
TIMEOUT = 20.0


class OddError(Exception):
    """An error that cannot be built from its ``args``."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__()
        self.code, self.reason = code, reason


class PoorError(Exception):
    """An error of a class without attributes of its own."""

    __slots__ = ()


def raising(error: BaseException) -> Callable[..., Any]:
    def raises_here(*_: Any) -> None:
        raise error

    return raises_here


def run(slots: list, *functions: Callable[[], Any], **options: Any) -> list[Any]:
    """Runs one replica for each function, all at the same time unless an option says otherwise."""
    options = options or {"workers": len(functions)}
    modules = [Call(function) for function in functions]
    return parallel_apply(modules, [()] * len(functions), devices=[slots[0]] * len(functions), **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OddError(3, reason="odd"),
        PoorError,
        lambda: KeyError("key"),
        lambda: StopIteration(1),
        lambda: SystemExit(2),
        KeyboardInterrupt,
        lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        lambda: torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=["odd", "poor", "KeyError", "StopIteration", "SystemExit", "KeyboardInterrupt", "Unicode", "OutOfMemory"],
)
@serial_or_not
def test_the_object_that_was_raised_is_raised(make: Callable, serial: bool, slots: list, root: torch.device) -> None:
    error = make()
    function = raising(error)
    with pytest.raises(type(error)) as caught:
        run(slots, int, function, serial=serial)
    assert caught.value is error
    assert error.__notes__ == [f"raised in replica 1 on device {root}"]
    assert traceback.extract_tb(error.__traceback__)[-1].name == "raises_here"
    assert error.__cause__ is None


def test_the_first_in_slot_order_is_raised_and_names_the_others(slots: list, root: torch.device) -> None:
    later_failed = threading.Event()

    def late() -> None:
        assert later_failed.wait(TIMEOUT)
        time.sleep(0.05)
        raise ValueError("late")

    def early() -> None:
        later_failed.set()
        raise OddError(1, reason="early")

    with pytest.raises(ValueError, match="late") as caught:
        run(slots, int, late, early, raising(KeyError("k")), workers=4)
    assert caught.value.__notes__ == [
        f"raised in replica 1 on device {root}",
        f"replica 2 on device {root} raised OddError too: ",
        f"replica 3 on device {root} raised KeyError too: 'k'",
    ]


def test_other_replicas_have_ended_when_it_is_raised(slots: list) -> None:
    failed, ended = threading.Event(), []

    def slow() -> None:
        assert failed.wait(TIMEOUT)
        time.sleep(0.1)
        ended.append("slow")

    def fails() -> None:
        failed.set()
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        run(slots, slow, fails, slow)
    assert ended == ["slow", "slow"]


class Fails(nn.Module):
    """Makes activations, then fails in the replicas for whose slot number, the first value of x, ``where`` is true."""

    def __init__(self, where: Callable[[int], bool]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.where = where
        self.made: list[weakref.ref] = []

    def forward(self, x: Tensor) -> Tensor:
        slot = int(x[0, 0])
        activation = torch.tanh(self.layer(x))
        for thing in (self, x, self.layer.weight, activation):
            self.made.append(weakref.ref(thing))
        if self.where(slot):
            raise ValueError(f"slot {slot}")
        return activation


def numbered(slots: list) -> Tensor:
    """A sample for each slot, which holds the slot's number."""
    return torch.arange(len(slots), device=slots[0]).float()[:, None].repeat(1, 4).requires_grad_()


def fail(model: nn.Module, x: Tensor) -> None:
    """Calls the module, and drops its error and the traceback."""
    try:
        model(x)
    except ValueError:
        return
    pytest.fail("the call did not fail")


def alive(made: list[weakref.ref]) -> list[str]:
    return [type(reference()).__name__ for reference in made if reference() is not None]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("where", [lambda slot: slot == 0, lambda slot: slot == 2, lambda slot: True])
@pytest.mark.parametrize("options", [{}, {"workers": 3}, {"workers": 1}, {"serial": True}], ids=str)
def test_memory_of_a_failed_call_is_free_after_except(
    where: Callable, options: dict, slots: list, root: torch.device
) -> None:
    module = Fails(where).to(root)
    model, x = DataParallel(module, slots, **options), numbered(slots)
    for _ in range(5):
        module.made.clear()
        fail(model, x)
        assert module.made
        assert soon(lambda: alive(module.made) == [])


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("outer", "inner"), [({}, {}), ({"workers": 3}, {"serial": True}), ({"serial": True}, {})])
def test_memory_of_a_failed_nested_call_is_free_too(outer: dict, inner: dict, slots: list, root: torch.device) -> None:
    failing = Fails(lambda slot: slot == 1).to(root)

    class Nests(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return parallel_apply([failing, failing], [x.to(root)] * 2, devices=[root] * 2, **inner)[0]

    model, x = DataParallel(Nests(), slots, **outer), numbered(slots)
    for _ in range(5):
        failing.made.clear()
        fail(model, x)
        assert failing.made
        # The module and its weight are the user's here, not replicas.
        assert soon(lambda: {*alive(failing.made)} <= {"Fails", "Parameter"})


@serial_or_not
def test_an_error_inside_a_nested_call_names_both_places(serial: bool, slots: list, root: torch.device) -> None:
    def nested() -> None:
        run(slots, int, raising(OddError(2, reason="deep")), serial=serial)

    with pytest.raises(OddError) as caught:
        run(slots, nested, serial=serial)
    assert caught.value.__notes__ == [f"raised in replica {slot} on device {root}" for slot in (1, 0)]
