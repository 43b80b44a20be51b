"""Puts the committed figures into the README: ``python bench/front_page.py`` after the suites have been run.

The table "What it costs" is made of ``results/beside_torch.csv`` and ``results/forms.csv``, the sentence of predictions
of ``results/timelines.csv``. Words around them are the README's own. ``tests/test_docs.py`` compares the two. Measures
nothing, and imports nothing of the benchmarks.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

BENCH = Path(__file__).parent
README = BENCH.parent / "README.rst"
MODELS = ("ResNet-50 of width 4", "GPT of width 24", "GPT of width 128")
ROWS = {
    "training step, ``DataParallel``": ("beside_torch", {"work": "training step", "quotient": "torch/ours"}),
    "training step, ``composable.replicate``": ("forms", {"quotient": "nn.DataParallel/replicate"}),
    "training step, ``composable.fully_shard``": ("forms", {"quotient": "nn.DataParallel/fully_shard"}),
    "inference, ``DataParallel``": ("beside_torch", {"work": "inference", "quotient": "torch/ours"}),
}
DEVICES = {"beside_torch": {"devices": "8"}, "forms": {"slots": "8 devices"}}
PREDICTED = {"model": "GPT-2 small, 8 x 512 tokens", "machine": "8 x A100"}
WAYS = ("composable.replicate", "torch.nn.DataParallel", "module alone")


def rows_of(suite: str) -> list[dict[str, str]]:
    with (BENCH / "results" / f"{suite}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def found(rows: list[dict[str, str]], wanted: dict[str, str]) -> list[dict[str, str]]:
    return [row for row in rows if wanted.items() <= row.items()]


def cost_table() -> str:
    """A row of ratios for each of `ROWS` that has been measured, as reStructuredText."""
    lines = [("times as fast as torch", *MODELS)]
    for title, (suite, wanted) in ROWS.items():
        own = {row["model"]: row for row in found(rows_of(suite), wanted | DEVICES[suite])}
        if own:
            ratios = [[float(own[model][name]) for name in ("ratio", "ratio_low", "ratio_high")] for model in MODELS]
            lines.append((title, *("{:.2f} ({:.2f} to {:.2f})".format(*ratio) for ratio in ratios)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rule, text[0], rule, *text[1:], rule])


def measured() -> str:
    """When and with what: of both tables, where they differ."""
    texts = [(BENCH / "results" / f"{suite}.rst").read_text(encoding="utf-8") for suite in DEVICES]
    days, pythons, torches = (
        " and ".join(dict.fromkeys(re.search(pattern, text)[1] for text in texts))  # type: ignore[index]
        for pattern in (r"Measured on (\S+)", r"Python ([\d.]+)", r"torch ([\w.+]+),")
    )
    return f"Measured on {days} with Python {pythons} and torch {torches},"


def predicted() -> list[str]:
    """Milliseconds of a step for each of `WAYS`, on most devices."""
    rows = found(rows_of("timelines"), PREDICTED)
    most = {row["way"]: row for row in sorted(rows, key=lambda row: int(row["devices"]))}
    return [f"{float(most[way]['step']):.1f} ms" for way in WAYS]


def with_figures(text: str) -> str:
    """The README with the committed figures in place of those that it has."""
    table = re.search(r"^=+(?:  =+)+\ntimes as fast.*?\n=[= ]+\n.*?\n=[= ]+$", text, re.M | re.S)
    assert table is not None, "the README has no table 'times as fast as torch'"
    text = text.replace(table[0], cost_table())
    text = re.sub(r"Measured on .*? and torch [\w.+]+,", measured(), text, flags=re.S)
    before, start, after = text.partition("For 8 A100 this predicts")
    figures = iter(predicted())
    sentence, end, rest = after.partition("(``docs/benchmarks.rst``)")
    sentence = re.sub(r"\d+\.\d ms", lambda _: next(figures), sentence)
    assert next(figures, None) is None, "the README has fewer predictions than the results"
    return before + start + sentence + end + rest


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
