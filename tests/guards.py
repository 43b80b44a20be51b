"""A command that takes out every wait between streams and every ``record_stream``, one at a time.

For each it says which test notices, and by what: a race, memory that is freed too early, a value, an error. A guard
that nobody notices is redundant, or a test is missing. From the root of the repository, files or folders of the
library, and after ``--`` what pytest is called with::

    python tests/guards.py dataparallel/sharded/units -- tests/sharded/units --devices=sim
    python tests/guards.py dataparallel/comm/streams --list

A guard is a statement that calls one of `GUARDS`. It works in a copy of the repository. It is no test, and nothing
calls it but a person.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".hypothesis", "build", "*.egg-info", "latest")
GUARDS = {
    *("hold", "make_callers_wait", "make_owners_wait", "make_wait", "receive", "record_stream", "release_deliveries"),
    *("synchronize", "wait_event", "wait_for", "wait_stream"),
}
JOINED = "streams_joined"  # without the guard it only makes the streams current


class Guard(NamedTuple):
    """A statement, or a block's context, of a file: the text of these lines is replaced."""

    file: str
    function: str
    first: int
    last: int
    text: str

    def taken_out(self) -> list[str]:
        lines = self.text.splitlines(keepends=True)
        if JOINED in self.text:
            return [line.replace(f"{JOINED}(", "__import__('guards').streams_set(") for line in lines]
        indentation = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
        return [f"{indentation}pass\n"]

    def __str__(self) -> str:
        return f"{self.file}:{self.first}: {self.function}: {' '.join(self.text.split())[:90]}"


def streams_set(streams: object) -> object:
    """In a changed copy: makes the streams current, and orders nothing."""
    from dataparallel.comm.streams import current

    return current.streams_set(streams)  # type: ignore[arg-type]


def guards_of(path: Path) -> Iterator[Guard]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for function in ast.walk(ast.parse("".join(lines))):
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            call = node.value if isinstance(node, ast.Expr) else None
            first = last = 0
            if isinstance(call, ast.Call) and _name(call) in GUARDS:
                first, last = node.lineno, node.end_lineno
            elif isinstance(node, ast.With) and any(_name(item.context_expr) == JOINED for item in node.items):
                first, last = node.lineno, node.items[-1].context_expr.end_lineno
            if first:
                yield Guard(str(path), function.name, first, last or first, "".join(lines[first - 1 : last]))


def _name(call: ast.expr) -> str:
    called = call.func if isinstance(call, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def noticed(folder: Path, arguments: list[str]) -> str:
    """Runs the tests in a changed copy until one fails, and returns what it says."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "tests")])}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    except subprocess.TimeoutExpired:
        return "hangs"
    words = [line for line in done.stdout.splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))]
    return " | ".join([*words[:1], *words[-1:]]) if done.returncode else "NOBODY"


def main() -> None:
    before, _, after = "\0".join(sys.argv[1:]).partition("\0--\0")
    paths = [Path(each) for each in before.split("\0") if each != "--list"]
    files = sorted(file for path in paths for file in ([path] if path.suffix == ".py" else path.rglob("*.py")))
    guards = list(dict.fromkeys(guard for file in files for guard in guards_of(file)))
    if "--list" in sys.argv:
        print(*guards, sep="\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "copy"
        shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
        for guard in guards:
            text = (ROOT / guard.file).read_text(encoding="utf-8").splitlines(keepends=True)
            text[guard.first - 1 : guard.last] = guard.taken_out()
            (folder / guard.file).write_text("".join(text), encoding="utf-8")
            print(guard, noticed(folder, after.split("\0")), sep="\n    ", flush=True)
            shutil.copy(ROOT / guard.file, folder / guard.file)


if __name__ == "__main__":
    main()
