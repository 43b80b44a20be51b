"""``docs/shared_state.rst`` lists what several threads share: variables that change, and classes with a lock."""

import re
from pathlib import Path

import pytest

import shared_state

pytestmark = pytest.mark.devices("cpu")

PAGE = Path(__file__).parent.parent / "docs" / "shared_state.rst"


def rows(heading: str) -> set[tuple[str, str]]:
    """File and name of each entry below a heading: ```file``: ``name``, ``name```."""
    section = re.split(r"\n-{3,}\n", PAGE.read_text().partition(f"\n{heading}\n")[2])[0]
    entries = re.findall(r"``([\w/]+)``:\s+((?:``\w+``[,\s]*)+)", section)
    return {(file, name) for file, names in entries for name in re.findall(r"``(\w+)``", names)}


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
