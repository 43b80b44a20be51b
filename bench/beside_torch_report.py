"""From the times beside ``torch.nn.parallel`` to a table and a plot: ratios, intervals, and bars to judge them by.

Does not know how the times were taken, and measures nothing itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beside_torch import Timed
from pairs import Comparison, Verdict
from places import device_name
from plots import figure_for
from shapes import NARROW_GPT, RESNET, WIDE_GPT

CAPTION = """\
ours and the other are median milliseconds of the two times that the quotient names. ratio is the median of the quotient
over the pairs, with its bootstrap 95 % interval. bar is what the ratio should be; reached says "not decided" where the
bar lies in the interval. Devices that are simulated, or those of a stand-in, compute on the CPU's cores. Their clocks
were off. On simulated devices plain copies stand in for torch's C++ functions; copies is their part of torch's time.

work:

replicate
    ``dataparallel.replicate`` beside ``torch.nn.parallel.replicate``, with gradients recorded. Replicas are dropped.
replicate, no_grad
    What the wrappers do first in ``forward`` under ``torch.no_grad()``: they make replicas.
replicate + end, no_grad
    The same, and the replicas are dropped, as at the end of the call.
replicate, frozen
    The same inside ``with model.options.frozen():``, where the library may rely on unchanged values and sends none.
inference, training step
    ``model(batch)`` in evaluation mode without gradients; ``forward``, a loss, ``backward`` and ``zero_grad``.
inference, frozen
    Inference inside ``with model.options.frozen():``.

quotient:

torch/ours
    How many times as fast as torch the library is.
(torch - copies)/ours
    On simulated devices: the same if torch's copies took no time, while the library's still do. What torch's own
    functions would give lies between the two.
ours/in a row, torch/in a row
    The time of the step over that of as many steps on one device, chunk after chunk. One device uses one core here,
    several use two.
torch/ready, threads: 1 or 2
    The time of torch over that of a wrapper that costs nothing, in the column "ours": copies of the module that are
    already on their devices, with their chunks, run by one thread or two. Nothing is sent, gathered or summed. No
    library that runs replicas in threads can be much faster on the same machine.
ours/ready
    The library's time over that of the ready replicas, with the number of threads that is faster."""

REPLICATE = "replicate"
REPLICATE_NO_GRAD = "replicate, no_grad"
REPLICATE_AND_END = "replicate + end, no_grad"
REPLICATE_FROZEN = "replicate, frozen"
INFERENCE = "inference"
INFERENCE_FROZEN = "inference, frozen"
TRAINING = "training step"
WORKS = (REPLICATE, REPLICATE_NO_GRAD, REPLICATE_AND_END, REPLICATE_FROZEN, INFERENCE, INFERENCE_FROZEN, TRAINING)

FASTER = "torch/ours"
FASTER_LESS_COPIES = "(torch - copies)/ours"
OVER_IN_A_ROW = "ours/in a row"
TORCH_OVER_IN_A_ROW = "torch/in a row"
TORCH_OVER_READY = "torch/ready, threads: {}"
OVER_READY = "ours/ready"

BAR_DEVICES = 8
AT_MOST = {OVER_IN_A_ROW, OVER_READY}
NARROW = (RESNET.name, NARROW_GPT.name)
BARS: dict[tuple[str, str, str], float] = {
    **{(REPLICATE, FASTER, model): 2.5 for model in NARROW},
    **{(REPLICATE, FASTER_LESS_COPIES, model): 2.1 for model in NARROW},
    **{(REPLICATE_NO_GRAD, FASTER, model): 6 for model in NARROW},
    **{(REPLICATE_AND_END, FASTER, model): 6 for model in NARROW},
    **{(REPLICATE_FROZEN, FASTER, model): 20 for model in NARROW},
    **{(INFERENCE, FASTER, model): 2.2 for model in NARROW},
    **{(INFERENCE_FROZEN, OVER_READY, model): 1.1 for model in NARROW},
    (INFERENCE, FASTER, WIDE_GPT.name): 1.3,
    **{(TRAINING, FASTER, model): 1.6 for model in NARROW},
    (TRAINING, FASTER, WIDE_GPT.name): 1.2,
    **{(TRAINING, OVER_IN_A_ROW, model): 1.15 for model in (*NARROW, WIDE_GPT.name)},
}


@dataclass(frozen=True)
class Row:
    """One quotient of two times, for one model, piece of work and number of devices."""

    model: str
    device: str
    devices: int
    work: str
    quotient: str
    pairs: int
    ours_ms: float
    other_ms: float
    copies_ms: float | None
    ratio: float
    ratio_low: float
    ratio_high: float
    bar: float | None
    at_most: bool
    verdict: Verdict | None
    load_before: float
    load_after: float

    def cells(self) -> dict[str, str]:
        return {
            "model": self.model,
            "devices": str(self.devices),
            "work": self.work,
            "quotient": self.quotient,
            "ours": f"{self.ours_ms:.2f}",
            "the other": f"{self.other_ms:.2f}",
            "copies": "" if self.copies_ms is None else f"{self.copies_ms:.2f}",
            "ratio": f"{self.ratio:.2f}",
            "95 % interval": f"{self.ratio_low:.2f} to {self.ratio_high:.2f}",
            "pairs": str(self.pairs),
            "bar": "" if self.bar is None else f"{'at most' if self.at_most else 'at least'} {self.bar:g}",
            "reached": self.verdict or "",
            "load": f"{self.load_before:.1f} to {self.load_after:.1f}",
        }


def summarise(model: str, devices: Sequence[Any], work: str, timed: Timed) -> list[Row]:
    """A row for each quotient for which there are times."""
    copies = 1e3 * statistics.median(timed.stand_ins) if timed.stand_ins else None
    quotients: list[tuple[str, Comparison, list[float], list[float], float | None]] = [
        (FASTER, timed.beside_torch(), timed.ours, timed.theirs, copies)
    ]
    if work.startswith(REPLICATE) and timed.stand_ins:
        less = timed.beside_torch_less_copies()
        quotients.append((FASTER_LESS_COPIES, less, timed.ours, less.theirs, copies))
    if timed.in_a_row:
        quotients.append((OVER_IN_A_ROW, timed.over_in_a_row(), timed.ours, timed.in_a_row, None))
        quotients.append((TORCH_OVER_IN_A_ROW, timed.torch_over_in_a_row(), timed.theirs, timed.in_a_row, None))
    for threads, ready in timed.ready.items():
        comparison = timed.torch_over_ready(threads)
        quotients.append((TORCH_OVER_READY.format(threads), comparison, ready, timed.theirs, None))
    if timed.ready:
        quotients.append((OVER_READY, timed.over_ready(), timed.ours, timed.fastest_ready(), None))
    rows = []
    for quotient, comparison, ours, other, copied in quotients:
        bar = BARS.get((work, quotient, model)) if len(devices) == BAR_DEVICES else None
        at_most = quotient in AT_MOST
        rows.append(
            Row(
                model=model,
                device=device_name(devices[0]),
                devices=len(devices),
                work=work,
                quotient=quotient,
                pairs=comparison.pairs,
                ours_ms=1e3 * statistics.median(ours),
                other_ms=1e3 * statistics.median(other),
                copies_ms=copied,
                ratio=comparison.ratio,
                ratio_low=comparison.low,
                ratio_high=comparison.high,
                bar=bar,
                at_most=at_most,
                verdict=None if bar is None else comparison.verdict(bar, not at_most),
                load_before=comparison.load_before,
                load_after=comparison.load_after,
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """For each model how many times as fast as torch it is, and its steps beside the same chunks in a row."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    models = list(dict.fromkeys(row.model for row in rows))
    counts = sorted({row.devices for row in rows})
    size = (3.6 * len(models), 6.4)
    with figure_for(path, size, 2, len(models), sharey="row") as figure:
        upper, lower = figure.axes[: len(models)], figure.axes[len(models) :]
        for column, model in enumerate(models):
            own = [row for row in rows if row.model == model]
            faster, steps = upper[column], lower[column]
            works = [work for work in WORKS if any(row.work == work for row in own)]
            by_work = [(work, [row for row in own if (row.work, row.quotient) == (work, FASTER)]) for work in works]
            _bars(faster, counts, by_work)
            by_quotient = [
                (quotient, [row for row in own if row.quotient == quotient])
                for quotient in (OVER_IN_A_ROW, TORCH_OVER_IN_A_ROW)
            ]
            _bars(steps, counts, by_quotient)
            faster.set_title(model)
            faster.set_yscale("log", base=2)
            faster.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        upper[0].set_ylabel("torch's time / ours")
        lower[0].set_ylabel("time of a step / single-device steps in a row")
        handles = [Patch(color=f"C{k}") for k in range(len(counts))]
        handles.append(Line2D([], [], color="red", linewidth=2))
        labels = [f"{count} devices ({rows[0].device})" for count in counts] + ["bar"]
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")


def _bars(axes: Any, counts: Sequence[int], groups: Sequence[tuple[str, Sequence[Row]]]) -> None:
    """A group of bars for each name, with one bar for each number of devices. In red is what the ratio should be."""
    width = 0.8 / len(counts)
    for k, count in enumerate(counts):
        placed = [(x, row) for x, (_, rows) in enumerate(groups) for row in rows if row.devices == count]
        places = [x + (k - (len(counts) - 1) / 2) * width for x, _ in placed]
        heights = [row.ratio for _, row in placed]
        whiskers = [
            [max(0.0, row.ratio - row.ratio_low) for _, row in placed],
            [max(0.0, row.ratio_high - row.ratio) for _, row in placed],
        ]
        axes.bar(places, heights, width, yerr=whiskers, capsize=2, color=f"C{k}", ecolor="0.2")
        for place, (_, row) in zip(places, placed, strict=True):
            if row.bar is not None:
                axes.hlines(row.bar, place - width / 2, place + width / 2, color="red", linewidth=2)
    axes.axhline(1, color="grey", linestyle=":")
    axes.set_xticks(range(len(groups)), [name for name, _ in groups], rotation=25, ha="right", fontsize="small")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
