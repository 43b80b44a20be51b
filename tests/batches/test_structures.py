"""Nested arguments are walked: leaves have paths in order, tensors are found, and `whole` marks a tensor."""

from typing import Any

import pytest
import torch

from dataparallel import scatter, whole
from dataparallel.batches.structures import is_whole, leaves, tensors_in


def test_leaves_have_paths_in_order() -> None:
    tree = {"a": [1, (2, None)], "b": {"c": "text"}}
    found = [*leaves(tree, "x")]
    paths = ['x["a"][0]', 'x["a"][1][0]', 'x["a"][1][1]', 'x["b"]["c"]']
    assert found == [*zip(paths, [1, 2, None, "text"], strict=True)]


def test_a_container_may_be_in_two_places_but_not_in_itself() -> None:
    part = [1]
    assert [value for _, value in leaves([part, part], "x")] == [1, 1]
    part.append(part)
    with pytest.raises(ValueError, match=r"x\[1\] contains itself"):
        list(leaves(part, "x"))


def test_tensors_are_found_at_any_depth(root: torch.device) -> None:
    a, b = torch.ones(2, device=root), torch.ones((), device=root)
    assert [*map(id, tensors_in([{"a": a}, 3, (b, [a])]))] == [id(a), id(b), id(a)]


def test_marked_tensors_and_tensors_without_dimensions_are_whole(root: torch.device) -> None:
    assert is_whole(torch.ones((), device=root))
    assert is_whole(whole(torch.ones(2, device=root)))
    assert not is_whole(torch.ones(2, device=root))


def test_whole_leaves_its_argument_unmarked(slots: list, root: torch.device) -> None:
    for table in (torch.ones(3, 2, device=root), torch.ones(3, 2, device=root, requires_grad=True)):
        whole(table)
        assert [part.shape[0] for part in scatter(table, slots)] == [1, 1, 1]
        assert [part.shape[0] for part in scatter(whole(table) * 1, slots)] == [1, 1, 1], "results carry no mark"


@pytest.mark.parametrize("value", [3, [torch.zeros(2)], None])
def test_only_tensors_are_marked_whole(value: Any) -> None:
    with pytest.raises(TypeError, match=f"whole.* marks a tensor; got {type(value).__name__}"):
        whole(value)
