"""References in attributes of an instance are found and replaced; the objects that held them stay as they were.

These tests use single values. Tests that replicas compute with their own weights are in test_replicate_references.
"""

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel.replicas import references
from dataparallel.replicas.references import reached

pytestmark = pytest.mark.devices("cpu")  # it knows no slots: once is enough


def refers(value: Any, known: Any) -> bool:
    return any(id(item) in known for item in reached(value))


def rebound(value: Any, table: dict[int, Any]) -> Any:
    return references.Rebinding(table).rebound(value)


class Owner(nn.Module):
    """Answers who it is, so that a callable shows whom it leads to."""

    def me(self, *_: Any) -> "Owner":
        return self


Pair = collections.namedtuple("Pair", "left right")


def a_partial(owner: Owner) -> Any:
    return functools.partial(lambda first, second: second, 1, second=owner)


def a_partial_of_a_method(owner: Owner) -> Any:
    return functools.partial(owner.me, 1)


def a_closure(owner: Owner) -> Any:
    return lambda: owner


def a_decorated_method(owner: Owner) -> Any:
    method = owner.me

    @functools.wraps(method)
    def wrapper(*args: Any) -> Any:
        return method(*args)

    return wrapper


def a_closure_with_an_empty_cell(owner: Owner) -> Any:
    def function() -> Owner:
        return owner if True else later

    if owner is None:
        later = 1
    return function


def a_closure_that_calls_itself(owner: Owner) -> Any:
    def count(steps: int = 2) -> Owner:
        return count(steps - 1) if steps else owner

    return count


WAYS: dict[str, tuple[Callable[[Owner], Any], Callable[[Any], Any]]] = {
    "itself": (lambda owner: owner, lambda value: value),
    "bound method": (lambda owner: owner.me, lambda value: value()),
    "partial": (a_partial, lambda value: value()),
    "partial of a method": (a_partial_of_a_method, lambda value: value()),
    "closure": (a_closure, lambda value: value()),
    "decorated method": (a_decorated_method, lambda value: value()),
    "closure with an empty cell": (a_closure_with_an_empty_cell, lambda value: value()),
    "closure that calls itself": (a_closure_that_calls_itself, lambda value: value()),
    "weak reference": (weakref.ref, lambda value: value()),
    "weak method": (lambda owner: weakref.WeakMethod(owner.me), lambda value: value()()),
    "list": (lambda owner: [1, owner], lambda value: value[1]),
    "tuple": (lambda owner: (owner, 1), lambda value: value[0]),
    "namedtuple": (lambda owner: Pair(1, owner), lambda value: value.right),
    "set": (lambda owner: {owner}, lambda value: next(iter(value))),
    "dict": (lambda owner: {"x": owner, "y": 1}, lambda value: value["x"]),
    "OrderedDict": (lambda owner: collections.OrderedDict(x=owner.me), lambda value: value["x"]()),
    "list of closures": (lambda owner: [a_closure(owner)], lambda value: value[0]()),
}


@pytest.mark.parametrize(("make", "follow"), WAYS.values(), ids=WAYS.keys())
def test_every_way_leads_to_the_replacement(make: Callable, follow: Callable) -> None:
    owner, replacement, stranger = Owner(), Owner(), Owner()
    value = make(owner)
    assert refers(value, {id(owner)})
    assert not refers(value, {id(stranger)})
    new = rebound(value, {id(owner): replacement})
    assert follow(new) is replacement
    assert follow(value) is owner, "the value itself stays as it was"
    assert type(new) is type(value)
    assert rebound(value, {id(stranger): replacement}) is value, "what leads nowhere else is not built anew"


def test_tensors_are_replaced_too() -> None:
    old, new = torch.zeros(1), torch.ones(1)
    for value in ([old, 1], {"w": old}, functools.partial(torch.add, old), lambda: old):
        assert refers(value, {id(old)})
    table = {id(old): new}
    assert rebound([old, 1], table)[0] is new
    assert rebound(functools.partial(torch.add, old), table).args[0] is new
    assert rebound(lambda: old, table)() is new


def test_weak_references_to_tensors_stay() -> None:
    old, new = torch.zeros(1), torch.ones(1)
    value = [weakref.ref(old)]
    assert not refers(value, {id(old)})
    assert rebound(value, {id(old): new}) is value


def test_a_function_keeps_all_but_its_cells() -> None:
    owner, replacement = Owner(), Owner()
    other = [0]

    def function(a: int, b: int = 2, *, c: int = 3) -> Any:
        """What it does."""
        return owner, other, a, b, c

    function.mark = "kept"  # type: ignore[attr-defined]
    new = rebound(function, {id(owner): replacement})
    assert new(1) == (replacement, other, 1, 2, 3)
    assert new(1)[1] is other
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "mark"):
        assert getattr(new, name) == getattr(function, name), name


def test_cells_without_references_are_shared() -> None:
    owner, replacement = Owner(), Owner()
    count = 0

    def function() -> Any:
        nonlocal count
        count += 1
        return owner

    assert rebound(function, {id(owner): replacement})() is replacement
    assert count == 1


def test_containers_keep_what_else_they_hold() -> None:
    class NotedList(list):
        note = ""

    owner, replacement = Owner(), Owner()
    noted = NotedList([owner])
    noted.note = "kept"
    assert rebound(noted, {id(owner): replacement}).note == "kept"
    default = collections.defaultdict(list, x=owner)
    assert rebound(default, {id(owner): replacement})["new"] == []
    assert list(rebound({"z": 1, "a": owner}, {id(owner): replacement})) == ["z", "a"]
    part = functools.partial(owner.me)
    part.note = "kept"  # type: ignore[attr-defined]
    assert rebound(part, {id(owner): replacement}).note == "kept"


def test_only_one_level_of_containers_is_followed() -> None:
    owner = Owner()
    assert refers([owner], {id(owner)})
    assert not refers([[owner]], {id(owner)})


def test_dead_references_and_functions_in_circles_end() -> None:
    owner = Owner()
    known = {id(owner): Owner()}
    for dead in (weakref.ref(Owner()), weakref.WeakMethod(Owner().me)):
        assert dead() is None
        assert rebound(dead, known) is dead
        assert not refers(dead, known)
    circle = a_closure_that_calls_itself(Owner())
    assert rebound(circle, known) is circle
    assert not refers(circle, known)


def test_a_container_that_two_attributes_share_stays_shared() -> None:
    old, new = Owner(), Owner()
    registry: dict[str, Any] = {}
    registry["call"] = lambda: (registry, old)
    rebinding = references.Rebinding({id(old): new})
    call, shared = rebinding.rebound(registry["call"]), rebinding.rebound(registry)
    assert call() == (shared, new)
    assert call()[0] is shared
    assert shared["call"] is call


def test_built_in_methods_of_parameters() -> None:
    old, new = torch.ones(2), torch.zeros(2)
    assert rebound(old.matmul, {id(old): new})(torch.ones(2)) == 0
    assert rebound(old.__add__, {id(old): new})(1).sum() == 2
