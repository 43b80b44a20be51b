"""Puts the committed figures into the README: ``python bench/front_page.py`` after the suites have been run.

The first table of "What it costs" is made of ``results/beside_torch.csv`` and ``results/forms.csv``, the second one and
the sentence below it of ``sharded_memory.csv``, ``forms.csv`` and ``sharded_speed.csv``, the sentence of predictions of
``timelines.csv``. What has run where is made of ``gpu/*/check.json``, which ``.ci/gpu`` writes. Words around them are
the README's own. ``tests/test_docs.py`` compares the two. Measures nothing.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from reporting import table

BENCH = Path(__file__).parent
README = BENCH.parent / "README.rst"
MODELS = ("ResNet-50 of width 4", "GPT of width 24", "GPT of width 128")
ROWS = {
    "training step, ``DataParallel``": ("beside_torch", {"work": "training step", "quotient": "torch/ours"}),
    "training step, ``composable.replicate``": ("forms", {"quotient": "nn.DataParallel/replicate"}),
    "inference, ``DataParallel``": ("beside_torch", {"work": "inference", "quotient": "torch/ours"}),
}
DEVICES = {"beside_torch": {"devices": "8"}, "forms": {"slots": "8 devices"}}
HELD = {"``composable.replicate``": "replicate", "``composable.fully_shard``": "fully_shard"}
SLOWER = {"slots": "8 devices", "model": "GPT of width 128", "quotient": "fully_shard/replicate"}
BESIDE_FSDP2 = {"slots": "2 devices", "quotient": "FSDP2/fully_shard"}
PREDICTED = {"model": "GPT-2 small, 8 x 512 tokens", "machine": "8 x A100"}
WAYS = ("composable.replicate", "torch.nn.DataParallel", "module alone")


def rows_of(suite: str) -> list[dict[str, str]]:
    with (BENCH / "results" / f"{suite}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def found(rows: list[dict[str, str]], wanted: dict[str, str]) -> list[dict[str, str]]:
    return [row for row in rows if wanted.items() <= row.items()]


def as_text(row: dict[str, str]) -> str:
    """A ratio and its interval."""
    return "{:.2f} ({:.2f} to {:.2f})".format(*(float(row[name]) for name in ("ratio", "ratio_low", "ratio_high")))


def cost_table() -> str:
    """A row of ratios for each of `ROWS` that has been measured."""
    rows = []
    for title, (suite, wanted) in ROWS.items():
        own = {row["model"]: row for row in found(rows_of(suite), wanted | DEVICES[suite])}
        if own:
            rows.append({"times as fast as torch": title, **{model: as_text(own[model]) for model in MODELS}})
    return table(rows)


def memory_table() -> str:
    """What each device holds, by each form of `HELD`, and how long a step takes."""
    rows = []
    (slower,) = found(rows_of("forms"), SLOWER)
    for title, way in HELD.items():
        (row,) = found(rows_of("sharded_memory"), {"devices": "8", "way": way})
        at_most = max(int(row[part]) for part in ("forward", "backward", "optimizer"))
        time = "1" if way == "replicate" else as_text(slower)
        sizes = {"between steps": int(row["idle"]), "at most in a step": at_most}
        texts = {name: f"{size / 2**20:.1f}" for name, size in sizes.items()}
        rows.append({"MiB of each device": title, **texts, "time of a step": time})
    return table(rows)


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


def what_has_run_where() -> str:
    """A row for each kind of machine. Those with GPUs have what `dataparallel.check` has found there."""
    rows = [
        ("CPU slots, simulated accelerators", "all tests"),
        ("torch's CUDA build on a stand-in for GPUs", "all tests"),
    ]
    checked = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(BENCH.glob("results/gpu/*/check.json"))]
    for title, fits in {"one GPU": lambda count: count == 1, "several GPUs": lambda count: count > 1}.items():
        own = [each for each in checked if fits(each["devices"])]
        rows += [(f"{title}: {each['machine']['names']}", _outcome(each)) for each in own] or [(title, "nothing")]
    return table([{"where": where, "what has run there": what} for where, what in rows])


def _outcome(report: dict[str, Any]) -> str:
    passed = sum(each["status"] == "passed" for each in report["findings"])
    failed = sum(each["status"] == "failed" for each in report["findings"])
    return f"{passed} checks passed, {failed} failed ({report['date']}, torch {report['machine']['torch'].split()[0]})"


def with_figures(text: str) -> str:
    """The README with the committed figures in place of those that it has."""
    for head, wanted in (
        ("times as fast", cost_table()),
        ("MiB of each", memory_table()),
        ("where  ", what_has_run_where()),
    ):
        old = re.search(rf"^=+(?:  =+)+\n{head}.*?\n=[= ]+\n.*?\n=[= ]+$", text, re.M | re.S)
        assert old is not None, f"the README has no table {head!r}"
        text = text.replace(old[0], wanted)
    (beside,) = found(rows_of("sharded_speed"), BESIDE_FSDP2)
    text = re.sub(r"(?<=its step is )\S+ \(.*?\)", as_text(beside), text)
    text = re.sub(r"Measured on .*? and torch [\w.+]+,", measured(), text, flags=re.S)
    before, start, after = text.partition("For 8 A100 this predicts")
    figures = iter(predicted())
    sentence, end, rest = after.partition("(``docs/benchmarks.rst``)")
    sentence = re.sub(r"\d+\.\d ms", lambda _: next(figures), sentence)
    assert next(figures, None) is None, "the README has fewer predictions than the results"
    return before + start + sentence + end + rest


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
