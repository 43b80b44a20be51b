"""``docs/shared_state.rst`` lists what several threads share: variables that change, and classes with a lock."""

import re
from pathlib import Path

import pytest

import shared_state

pytestmark = pytest.mark.devices("cpu")

PAGE = Path(__file__).parent.parent / "docs" / "shared_state.rst"


def rows(heading: str) -> set[tuple[str, str]]:
    """File and name of each row in the table below a heading."""
    section = re.split(r"\n-{3,}\n", PAGE.read_text().partition(f"\n{heading}\n")[2])[0]
    cells = [re.split(r"\n     - ", row) for row in re.split(r"\n   \* - ", section)[2:]]
    return {(cell[0].strip().strip("`"), name) for cell in cells for name in re.findall(r"``(\w+)``", cell[1])}


def in_code(find) -> set[tuple[str, str]]:
    return {(file, name) for file, tree in shared_state.files().items() for name in find(tree)}


def test_every_variable_that_changes_is_listed_and_exists() -> None:
    listed = rows("Module-level variables")
    assert in_code(shared_state.variables) - listed == set()
    assert listed - in_code(shared_state.variables) == set()


def test_every_class_with_a_lock_is_listed_and_exists() -> None:
    listed = rows("Objects with a lock")
    assert in_code(shared_state.classes_with_locks) - listed == set()
    assert listed - in_code(shared_state.classes_with_locks) == set()


def test_classes_without_a_lock_exist() -> None:
    listed = rows("Objects without one")
    assert listed
    assert listed - in_code(shared_state.classes) == set()
    assert listed & in_code(shared_state.classes_with_locks) == set()
