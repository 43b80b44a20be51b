"""How all results are reported: a table for the terminal and as reStructuredText, a CSV file, a plot, the environment.

A row is a dictionary of what was measured, and its keys are the columns of the CSV file. A `Report` says how a row is
shown. Knows nothing of what was measured.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from string import Formatter
from textwrap import fill
from typing import Any

import torch

LINE = 120  # characters

Row = Mapping[str, Any]
Cell = str | Callable[[Row], str]
"""A template such as ``"{low:.2f} to {high:.2f}"`` over the keys of a row, or a function of the row."""


class _Cells(Formatter):
    """``yes`` and ``no`` for truth; a format that ends with ``MiB`` divides bytes."""

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        if spec.endswith("MiB"):
            return format(value / 2**20, spec.removesuffix("MiB"))
        return str(super().format_field(value, spec))


CELLS = _Cells()


def shown(cell: Cell, row: Row) -> str:
    """The text of a cell, which is empty where a key of its template has no value."""
    if callable(cell):
        return cell(row)
    names = [name for _, name, _, _ in CELLS.parse(cell) if name]
    return "" if any(row[name] is None for name in names) else CELLS.vformat(cell, (), row)


@dataclass
class Report:
    """The results of one file of benchmarks. Its tests fill it; at the end it is printed and written.

    ``cells`` has a cell for each title of the table.
    """

    name: str
    caption: str
    cells: Mapping[str, Cell]
    plot: Callable[[Sequence[Row], Path], None] | None = None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Everything but the plot, as reStructuredText that is readable as it stands. The table comes last."""
        parts = [environment(), *(fill(note, LINE, break_long_words=False) for note in self.notes)]
        if self.rows:
            parts.insert(1, self.caption)
            parts.append(self.table())
        return "\n\n".join(parts) + "\n"

    def table(self) -> str:
        return table([{title: shown(cell, row) for title, cell in self.cells.items()} for row in self.rows])

    def write(self, directory: Path) -> list[Path]:
        """Writes `name.rst`, `name.csv` and, where there is a plot, `name.png`, and returns their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        text, numbers = directory / f"{self.name}.rst", directory / f"{self.name}.csv"
        text.write_text(self.text(), encoding="utf-8")
        with numbers.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self.rows[0])
            for row in self.rows:
                writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in row.values())
        if self.plot is None:
            return [text, numbers]
        picture = directory / f"{self.name}.png"
        self.plot(self.rows, picture)
        return [text, numbers, picture]


def table(rows: Sequence[dict[str, str]]) -> str:
    """A simple reStructuredText table. The first cell of a row must not be empty.

    All titles but the first may have several lines.
    """
    head = list(zip_longest(*(title.split("\n") for title in rows[0]), fillvalue=""))
    lines = [*head, *(tuple(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rule, *text[: len(head)], rule, *text[len(head) :], rule])


def environment() -> str:
    """One line that says when and with what this was measured."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"Measured on {datetime.date.today().isoformat()} with Python {platform.python_version()}, "
        f"torch {torch.__version__}, {cores} CPU cores, {torch.get_num_threads()} intra-op thread."
    )
