"""Leaves out one guard of the library in this process: a wait or an event, by the place of its call.

Guards are found by their names, in the syntax tree of a folder. A guard is

- a call of `WAITS`: what makes a stream or the host wait, of torch or of the library, or a function of the library
  that does nothing but such calls;
- an event of the library that is kept (`EVENTS`). If its ``make_wait`` is called at once, that is the guard;
- a use of ``streams_joined``; without the guard it only makes the streams current.

Waits of threads for threads are none.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from dataparallel.comm.streams.current import Event, GivenEvents, streams_set

ROOT = Path(__file__).resolve().parent.parent

ONLY_ORDER = {"wait_for", "make_wait", "synchronize", "_make_computing_wait", "release_deliveries"}
WAITS = {*ONLY_ORDER, "wait_stream", "wait_event", "record_stream"}
EVENTS = {"Event", "GivenEvents", "record_event"}


@dataclass(frozen=True)
class Guard:
    """One call. ``lines`` are those of its file."""

    name: str
    file: str
    called: str
    lines: range


def guards_in(folder: str) -> dict[str, Guard]:
    """The guards of a folder of the package, by their names below it: file, place, call and its number there."""
    found = {}
    for path in sorted((ROOT / "dataparallel" / folder).rglob("*.py")):
        numbers: Counter[str] = Counter()
        for call, place, parent in _calls(ast.parse(path.read_bytes()), ""):
            called = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            waits_at_once = isinstance(parent, ast.Attribute) and parent.attr in WAITS
            if called in WAITS or called == "streams_joined" or (called in EVENTS and not waits_at_once):
                name = f"{path.relative_to(ROOT / 'dataparallel' / folder)}:{place}:{called}"
                numbers[name] += 1
                name = f"{name}:{numbers[name]}"
                found[name] = Guard(name, str(path), called, range(call.lineno, call.end_lineno + 1))
    return found


def _calls(parent: ast.AST, place: str) -> Iterator[tuple[ast.Call, str, ast.AST]]:
    """Each call in the order of the text, with the class and the function it is in, and its parent."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Call):
            yield node, place, parent
        is_place = isinstance(node, (ast.ClassDef, ast.FunctionDef))
        yield from _calls(node, f"{place}.{node.name}".lstrip(".") if is_place else place)


@contextmanager
def left_out(guard: Guard, purpose: str | None = None) -> Iterator[None]:
    """Inside, nobody waits at the guard, or for what it records.

    ``purpose``: only where the guard's function has been given this purpose.
    """

    def is_at(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename == guard.file and frame.f_lineno in guard.lines:
                return purpose is None or frame.f_locals["purpose"] == purpose
            if frame.f_code.co_name not in {*ONLY_ORDER, "meet", "<listcomp>", "<genexpr>"}:
                return False
            frame = frame.f_back
        return False

    is_event = guard.called in EVENTS

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
        if guard.called == "record_stream":
            record = torch.Tensor.record_stream
            patch.setattr(torch.Tensor, "record_stream", lambda *args: is_at(sys._getframe(1)) or record(*args))
        if guard.called == "streams_joined":
            module = guard.file.removeprefix(f"{ROOT}/").removesuffix(".py").replace("/", ".")
            patch.setattr(sys.modules[module], "streams_joined", streams_set)
        yield
