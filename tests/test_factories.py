"""A default device, which a user sets, changes no tensor that the library makes for itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dataparallel

LIBRARY = Path(dataparallel.__file__).parent
FACTORIES = frozenset({"arange", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "ones", "rand",
                       "randint", "randn", "randperm", "tensor", "zeros"})  # fmt: skip


def without_device(code: str) -> Iterator[int]:
    """The lines with calls of torch's factories that leave the device to the default."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and not any(each.arg in ("device", None) for each in node.keywords):
                yield node.lineno


@pytest.mark.devices("cpu")
def test_every_tensor_is_made_on_a_named_device() -> None:
    found = [
        f"{path.relative_to(LIBRARY)}:{line}"
        for path in sorted(LIBRARY.rglob("*.py"))
        if "testing" not in path.parts
        for line in without_device(path.read_text())
    ]
    assert found == []


@pytest.mark.devices("cpu")
def test_a_call_without_device_is_found() -> None:
    assert [*without_device("torch.zeros(2)\ntorch.zeros(2, device=CPU)\ntorch.empty(3, **options)")] == [1]
