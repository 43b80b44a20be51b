"""How results are reported: a table for the terminal and as reStructuredText, a CSV file, a plot, and the environment.

Does not know what was measured, and measures nothing itself.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple, Protocol

import torch

LINE = 120  # characters


class Row(Protocol):
    """A dataclass, whose fields are the columns of the CSV file."""

    __dataclass_fields__: dict[str, Any]

    def cells(self) -> dict[str, str]:
        """The row of the table: a text for each title. All rows have the same titles."""


@dataclass
class Report:
    """The results of one file of benchmarks. Its tests fill it; at the end it is printed and written."""

    name: str
    caption: str
    plot: Callable[[Sequence[Any], Path], None] | None = None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Everything but the plot, as reStructuredText that is readable as it stands. The table comes last."""
        parts = [environment(), *(fill(note, LINE, break_long_words=False) for note in self.notes)]
        if self.rows:
            parts.insert(1, self.caption)
            parts.append(table([row.cells() for row in self.rows]))
        return "\n\n".join(parts) + "\n"

    def write(self, directory: Path) -> list[Path]:
        """Writes `name.rst`, `name.csv` and, where there is a plot, `name.png`, and returns their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        text, numbers = directory / f"{self.name}.rst", directory / f"{self.name}.csv"
        text.write_text(self.text(), encoding="utf-8")
        with numbers.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            columns = [column.name for column in fields(self.rows[0])]
            writer.writerow(columns)
            for row in self.rows:
                values = (getattr(row, column) for column in columns)
                writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in values)
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


class Quartiles(NamedTuple):
    """The median of several measurements, and the bounds of their middle half."""

    low: float
    middle: float
    high: float


def quartiles(values: Iterable[float]) -> Quartiles:
    """The quartiles of at least two values."""
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """Round by round: on a machine that does other things too, only times of the same round can be compared."""
    return [this / that for this, that in zip(these, those, strict=True)]


def environment() -> str:
    """One line that says when and with what this was measured."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"Measured on {datetime.date.today().isoformat()} with Python {platform.python_version()}, "
        f"torch {torch.__version__}, {cores} CPU cores, {torch.get_num_threads()} intra-op thread."
    )
