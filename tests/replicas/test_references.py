"""What a replaced reference keeps, and what is not replaced. Each way to refer is in test_replicate_references."""

import collections
import functools
import weakref
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

    def circle() -> Any:
        return circle

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
