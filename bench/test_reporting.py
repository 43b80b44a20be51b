"""How a report is made of rows. Nothing is timed here."""

from __future__ import annotations

import csv
from pathlib import Path

from reporting import Report, table

ROWS = [
    {"way": "ours", "seconds": 1.25, "held": 3 * 2**20, "within": True},
    {"way": "torch", "seconds": None, "held": 2**20, "within": False},
]
CELLS = {
    "way": "{way}",
    "ms": lambda row: "" if row["seconds"] is None else str(1000 * row["seconds"]),
    "s": "{seconds:.1f} s",
    "held": "{held:.1fMiB}",
    "within": "{within}",
}


def test_titles_of_a_table_may_have_several_lines() -> None:
    assert table([{"a": "1", "two\nlines": "2"}]).splitlines() == [
        "=  =====",
        "a  two",
        "   lines",
        "=  =====",
        "1  2",
        "=  =====",
    ]


def test_cells_are_templates_or_functions_and_empty_where_nothing_was_measured() -> None:
    _, _, _, first, second, _ = Report("tiny", "", CELLS, rows=[*ROWS]).table().splitlines()
    assert first.split() == ["ours", "1250.0", "1.2", "s", "3.0", "yes"]
    assert second.split() == ["torch", "1.0", "no"]


def test_a_csv_file_has_the_keys_and_values_and_the_plot_gets_the_rows(tmp_path: Path) -> None:
    drawn: list[object] = []
    report = Report("tiny", "Caption.", CELLS, lambda rows, path: drawn.extend([*rows, path]), [*ROWS], ["A note."])
    text, numbers, picture = report.write(tmp_path)
    assert "Caption.\n\nA note." in text.read_text()
    with numbers.open(newline="") as file:
        assert [*csv.reader(file)] == [
            [*ROWS[0]],
            ["ours", "1.25", "3145728", "True"],
            ["torch", "", "1048576", "False"],
        ]
    assert drawn == [*ROWS, picture]
