"""Draws the house in ``docs/design.rst``: the rooms of the package, in the order of the floors, with their files.

From the root of the repository::

    python docs/house.py

The floors and their sentences are in ``tests/test_floors.py``, and the files are those of the tree. A test fails while
the page has another drawing.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design.rst"
DRAWING = re.compile(r"^    dataparallel/\n(?: {6}.*\n|\n)+", re.M)
COLUMN = 28  # where sentences begin


def floors() -> str:
    """The text that names the rooms, from the top of the house to its ground."""
    tree = ast.parse((ROOT / "tests" / "test_floors.py").read_text(encoding="utf-8"))
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "FLOORS"
    ]
    found: str = ast.literal_eval(values[0])
    return found


def drawn() -> str:
    """The drawing, as it stands on the page."""
    lines = ["    dataparallel/"]
    for line in floors().strip().splitlines():
        name, _, sentence = line.strip().partition(" ")
        if name == "───":
            lines += ["", f"      {line.strip()}"]
            continue
        path = ROOT / "dataparallel" / name.replace(".", "/")
        shown = f"{name}/" if path.is_dir() else f"{name.replace('.', '/')}.py"
        lines.append(f"      {shown:<{COLUMN - 6}}{sentence.strip()}".rstrip())
        if path.is_dir():
            below = sorted(item.stem for item in path.iterdir() if item.suffix == ".py" and item.stem != "__init__")
            folders = sorted(f"{item.parent.name}/" for item in path.glob("*/__init__.py"))
            lines += textwrap.wrap(
                ", ".join([*below, *folders]), 116, initial_indent=" " * COLUMN, subsequent_indent=" " * COLUMN
            )
    return "\n".join(lines) + "\n"


def on_page() -> str:
    """The drawing that the page has."""
    found = DRAWING.search(PAGE.read_text(encoding="utf-8"))
    assert found, f"{PAGE} has no drawing"
    return found[0].rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(on_page(), drawn()), encoding="utf-8")
