"""Leaves out one guard of the library in this process: a wait or an event, by the place of its call.

Guards are found by the syntax trees of a folder of the package. A guard is

- a call of ``make_wait``, ``wait_stream`` or ``record_stream``, or of ``synchronize``, by which the host waits;
- a call of a function of the folder that does nothing but call guards;
- an event of the library that is kept: a call of `EVENTS`. If its ``make_wait`` is called at once, that is the guard;
- a use of ``streams_joined``, which joins streams; without the guard it only makes them current.

Waits of threads for threads are none.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dataparallel.comm.streams.current import Event, GivenEvents, streams_set

ROOT = Path(__file__).resolve().parent.parent

EVENTS = {"Event", "GivenEvents", "Arrival", "ReadyEvent"}
STREAM_CALLS = {"wait_stream", "record_stream", "make_wait"}


@dataclass(frozen=True)
class Guard:
    """One call. ``start`` and ``end`` are positions in the bytes of its file."""

    name: str
    file: str
    how: str  # "nothing", "blank" or "streams_joined"
    start: int
    end: int


def guards_in(folder: str) -> dict[str, Guard]:
    """The guards of a folder of the package, by their names below it."""
    trees = {}
    for path in sorted((ROOT / "dataparallel" / folder).rglob("*.py")):
        trees[str(path.relative_to(ROOT))] = (path.read_bytes(), ast.parse(path.read_bytes()))
    package = _Package({file: tree for file, (_, tree) in trees.items()})
    found = [guard for file, (source, tree) in trees.items() for guard in _in_file(file, source, tree, package)]
    return {guard.name.removeprefix(folder): guard for guard in found}


class _Package:
    """Which functions of the folder only order streams."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.functions: set[tuple[str, str]] = set()  # module and name
        self.own_methods: set[tuple[str, str, str]] = set()  # file, class and name
        self.imports = {file: _imports(tree) for file, tree in trees.items()}
        self._defined: dict[str, set[tuple[str, str]]] = defaultdict(set)  # file and class of each method
        for file, tree in trees.items():
            for owner, function in _functions(tree):
                if owner is not None:
                    self._defined[function.name].add((file, owner))
        before = -1
        while before != len(self.functions) + len(self.own_methods):
            before = len(self.functions) + len(self.own_methods)
            for file, tree in trees.items():
                for owner, function in _functions(tree):
                    if _only_orders(function, self, file, owner):
                        if owner is None:
                            self.functions.add((_module(file), function.name))
                        else:
                            self.own_methods.add((file, owner, function.name))

    def is_guard(self, call: ast.Call, file: str, owner: str | None) -> bool:
        """True if the call orders streams, and its value is not used as an event."""
        called = call.func
        if isinstance(called, ast.Name):
            return self.imports[file].get(called.id, (_module(file), called.id)) in self.functions
        if not isinstance(called, ast.Attribute):
            return False
        if called.attr in STREAM_CALLS or (called.attr == "synchronize" and not call.args):
            return True
        if isinstance(called.value, ast.Name) and called.value.id == "self" and owner is not None:
            return (file, owner, called.attr) in self.own_methods
        classes = self._defined.get(called.attr, set())
        return bool(classes) and all((*each, called.attr) in self.own_methods for each in classes)


def _in_file(file: str, source: bytes, tree: ast.Module, package: _Package) -> list[Guard]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    numbers: Counter[tuple[str, str]] = Counter()
    found: list[Guard] = []

    def add(node: ast.expr, place: str, call: str, how: str) -> None:
        numbers[place, call] += 1
        name = f"{file.removeprefix('dataparallel/')}:{place}:{call}:{numbers[place, call]}"
        found.append(Guard(name, file, how, *span(node)))

    for node, owner, function, parent in _walk(tree):
        place = ".".join(part for part in (owner, function and function.name) if part) or "module"
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name):
            module, name = package.imports[file].get(called.id, (_module(file), called.id))
            if name == "streams_joined" and module.startswith("dataparallel."):
                add(node, place, name, name)
                continue
            if name in EVENTS and module.startswith("dataparallel."):
                waits_at_once = isinstance(parent, ast.Attribute) and parent.attr in ("make_wait", "synchronize")
                if not waits_at_once:
                    add(node, place, name, "blank")
                continue
        if package.is_guard(node, file, owner):
            add(node, place, called.attr if isinstance(called, ast.Attribute) else called.id, "nothing")
    return found


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, str | None, ast.FunctionDef | None, ast.AST]]:
    """Each node in the order of the text, with the class and the function it is in, and its parent."""

    def below(
        parent: ast.AST, owner: str | None, function: ast.FunctionDef | None
    ) -> Iterator[tuple[ast.AST, str | None, ast.FunctionDef | None, ast.AST]]:
        for node in ast.iter_child_nodes(parent):
            yield node, owner, function, parent
            inner_owner = node.name if isinstance(node, ast.ClassDef) else owner
            inner = node if isinstance(node, ast.FunctionDef) else function
            yield from below(node, inner_owner, inner)

    return below(tree, None, None)


def _functions(tree: ast.Module) -> Iterator[tuple[str | None, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield node.name, inner


def _only_orders(function: ast.FunctionDef, package: _Package, file: str, owner: str | None) -> bool:
    """True if all that the function does is to call guards, whatever it computes and asks for that."""
    if function.name.startswith("__") or function.decorator_list:
        return False
    guards = 0
    for node in ast.walk(function):
        if isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant):
                continue
            call = node.value
            if not (isinstance(call, ast.Call) and package.is_guard(call, file, owner)):
                return False
            if isinstance(call.func, ast.Attribute) and call.func.attr == "synchronize":
                return False  # the host's waits are named one by one
            guards += 1
        elif isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.Raise, ast.Delete, ast.AugAssign)) or (
            isinstance(node, ast.Return) and node.value is not None
        ):
            return False
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not all(isinstance(part, ast.Name) for target in targets for part in _parts(target)):
                return False
    return guards > 0


def _parts(target: ast.expr) -> list[ast.expr]:
    return [*target.elts] if isinstance(target, ast.Tuple) else [target]


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


_ONLY_ORDER = {
    "wait_for",
    "meet",
    "_make_computing_wait",
    "release_deliveries",
    "make_wait",
    "synchronize",
    "<listcomp>",
    "<genexpr>",
}
"""Functions behind whose callers' lines an event may be recorded or waited for."""


@contextmanager
def left_out(guard: Guard, purpose: str | None = None) -> Iterator[list[bool]]:
    """Inside, nobody waits at the guard, or for what it records. Yields a list that grows each time it is reached.

    ``purpose``: only where the guard's function has been given this purpose.
    """
    file, source = str(ROOT / guard.file), (ROOT / guard.file).read_bytes()
    lines = range(source[: guard.start].count(b"\n") + 1, source[: guard.end].count(b"\n") + 2)
    reached: list[bool] = []

    def is_at(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename == file and frame.f_lineno in lines:
                if purpose is None or frame.f_locals["purpose"] == purpose:
                    reached.append(True)
                    return True
                return False
            if frame.f_code.co_name not in _ONLY_ORDER:
                return False
            frame = frame.f_back
        return False

    is_event = guard.how == "blank"

    def recording(record: Any) -> Any:
        def recorded(event: Any, given: Any, **options: Any) -> None:
            record(event, given, **options)
            event.is_left_out = is_event and is_at(sys._getframe(1))

        return recorded

    def waiting(wait: Any) -> Any:
        def waited(event: Any, *stream: Any) -> None:
            if not event.is_left_out and (is_event or not is_at(sys._getframe(1))):
                wait(event, *stream)

        return waited

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "is_left_out", False, raising=False)  # of those that have been recorded before
        for kind in (Event, GivenEvents):
            patch.setattr(kind, "__init__", recording(kind.__init__))
            patch.setattr(kind, "make_wait", waiting(kind.make_wait))
            patch.setattr(kind, "synchronize", waiting(kind.synchronize))
        if guard.how == "streams_joined":
            module = sys.modules[guard.file.removesuffix(".py").replace("/", ".")]
            patch.setattr(module, "streams_joined", streams_set)
        yield reached
