"""``docs/shared_state.rst`` lists what several threads share: variables that change, and classes with a lock."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.devices("cpu")

PAGE = Path(__file__).parent.parent / "docs" / "shared_state.rst"
ROOT = Path(__file__).parent.parent / "dataparallel"

CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popleft", "remove", "setdefault", "update"}
"""Methods that change a table."""

CONSTANT = {
    *("Container", "Cupy", "Form", "Links", "ParamSpec", "Path", "TypeVar", "ThroughHost"),
    *("Star", "_CallOfReplicas", "_FullyShard", "_Strategy"),
}
"""Classes whose objects nobody changes once they are made."""

LOCKS = {"Condition", "Lock", "RLock"}


@functools.cache
def files() -> dict[str, ast.Module]:
    """The tree of each file by its name in the package: ``comm/peers``. Tools for tests are left out."""
    return {
        str(path.relative_to(ROOT).with_suffix("")).removesuffix("/__init__"): ast.parse(path.read_text("utf-8"))
        for path in sorted(ROOT.rglob("*.py"))
        if "testing" not in path.relative_to(ROOT).parts
    }


def variables(tree: ast.Module) -> Iterator[str]:
    """The module's variables that functions may change, and its functions with a cache."""
    changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    changed |= {name for function in _functions(tree) for name in _changed_in(function)}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (target.id for target in targets if isinstance(target, ast.Name)):
                if name in changed or (_can_change(node.value) and not _is_named_as_constant(name)):
                    yield name
    for function in _functions(tree):
        if any(_called(decorator) in ("cache", "lru_cache") for decorator in function.decorator_list):
            yield function.name


def classes(tree: ast.Module) -> Iterator[str]:
    """All classes."""
    return (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def classes_with_locks(tree: ast.Module) -> Iterator[str]:
    """The classes whose objects have a lock, and those with a value for each thread."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            calls = [_called(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)]
            fields = [_called(each) for each in ast.walk(node) if isinstance(each, (ast.Attribute, ast.Name))]
            if {*calls, *fields} & LOCKS or "local" in map(_called, node.bases):
                yield node.name


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _changed_in(function: ast.FunctionDef) -> Iterator[str]:
    """The names of tables that the function changes."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield _called(node.func.value)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield _called(node.value)


def _can_change(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        name = _called(value.func)
        is_class = name[:1].isupper() or (name.startswith("_") and name[1:2].isupper())
        return name in ("count", "deque", "dict", "list", "local", "set") or (is_class and name not in CONSTANT)
    return isinstance(value, (ast.Dict, ast.DictComp, ast.List, ast.ListComp, ast.Set, ast.SetComp))


def _is_named_as_constant(name: str) -> bool:
    return name.isupper() or name.startswith("__")


def _called(node: ast.expr) -> str:
    """The last name of ``a.b.c``, or of the function in ``f(...)``."""
    if isinstance(node, ast.Call):
        return _called(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def rows(heading: str) -> set[tuple[str, str]]:
    """File and name of each entry below a heading: ```file``: ``name``, ``name```."""
    section = re.split(r"\n-{3,}\n", PAGE.read_text().partition(f"\n{heading}\n")[2])[0]
    entries = re.findall(r"``([\w/]+)``:\s+((?:``\w+``[,\s]*)+)", section)
    return {(file, name) for file, names in entries for name in re.findall(r"``(\w+)``", names)}


def in_code(find) -> set[tuple[str, str]]:
    return {(file, name) for file, tree in files().items() for name in find(tree)}


def test_every_variable_that_changes_is_listed_and_exists() -> None:
    listed = rows("Module-level variables")
    assert in_code(variables) - listed == set()
    assert listed - in_code(variables) == set()


def test_every_class_with_a_lock_is_listed_and_exists() -> None:
    listed = rows("Objects with a lock")
    assert in_code(classes_with_locks) - listed == set()
    assert listed - in_code(classes_with_locks) == set()


def test_classes_without_a_lock_exist() -> None:
    listed = rows("Objects without one")
    assert listed
    assert listed - in_code(classes) == set()
    assert listed & in_code(classes_with_locks) == set()
