"""The end of a pass of backward is noticed, whether it succeeds or fails, and what belongs to the pass goes with it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.autograd import pass_of_backward
from dataparallel.autograd.pass_of_backward import running_pass, wait_for_passes

pytestmark = pytest.mark.devices("cpu")


class Fails(Exception):
    """What a hook raises."""


def watched(*hooks: Callable[[], object]) -> Tensor:
    """A tensor whose backward calls these."""
    x = torch.ones(2, requires_grad=True) * 1
    for hook in hooks:
        x.register_hook(lambda grad, hook=hook: hook() and None)
    return x


def fail(*_: Any) -> None:
    raise Fails


def noted(heard: list[Any]) -> Callable[[], None]:
    return lambda: running_pass().on_end(heard.append)


def test_of_a_pass_that_succeeds_or_fails():
    heard: list[bool] = []
    x = watched(noted(heard))
    for _ in range(2):
        x.sum().backward(retain_graph=True)
    with pytest.raises(Fails):
        watched(noted(heard), fail).sum().backward()
    assert heard == [True, True, False]


def test_what_raises_at_the_end_fails_the_pass_for_those_after_it():
    heard: list[Any] = []
    with pytest.raises(Fails):
        watched(noted(heard), lambda: running_pass().on_end(fail), noted(heard)).sum().backward()
    assert heard == [True, False]


def test_the_first_error_at_the_end_is_the_one_that_is_raised():
    def fail_again(ok: bool) -> None:
        raise KeyError("again")

    with pytest.raises(Fails) as caught:
        watched(lambda: running_pass().on_end(fail), lambda: running_pass().on_end(fail_again)).sum().backward()
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_raises_after_a_failure_keeps_nobody_from_hearing_of_it(recwarn: Any):
    heard: list[Any] = []
    with pytest.raises(Fails):
        watched(lambda: running_pass().on_end(lambda ok: heard.append("first")), noted(heard), fail).sum().backward()
    assert heard == ["first", False]


def test_a_nested_pass_has_an_end_of_its_own():
    heard: list[Any] = []

    def nested() -> None:
        with torch.enable_grad():
            watched(lambda: running_pass().on_end(lambda ok: heard.append("inner"))).sum().backward()

    outer = watched(lambda: running_pass().on_end(lambda ok: heard.append("outer")), nested)
    outer.sum().backward()
    assert heard == ["inner", "outer"]


class Kept:
    """What belongs to a pass."""


@pytest.mark.parametrize("ends", [lambda: None, fail], ids=["succeeds", "fails"])
def test_what_belongs_to_a_pass_is_made_once_and_goes_with_it(ends: Callable[[], None]):
    made: list[Any] = []

    def make(of_pass: object) -> Kept:
        kept = Kept()
        made.append(weakref.ref(kept))
        return kept

    x = watched(*[lambda: running_pass().get("kept", make) and None] * 2, ends)
    with suppress(Fails):
        x.sum().backward()
    assert [reference() for reference in made] == [None]
    assert pass_of_backward._passes == {}


def test_there_is_none_outside_of_a_backward():
    with pytest.raises(RuntimeError):
        running_pass()
    assert pass_of_backward._passes == {}


def test_who_waits_for_a_pass_that_only_the_collector_can_end_has_it_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_of_backward, "_COUNTS_ARE_BIASED", True)
    over: list[int] = []

    class Circle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            over.append(0)

    changed = threading.Condition()
    with changed:
        Circle()
        assert wait_for_passes(changed, lambda: bool(over), 20.0)
        over.clear()
        assert not wait_for_passes(changed, lambda: bool(over), 0.1)
