"""From the times of the stages to a table and a plot: medians, and the whole step beside the same chunks by hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from places import device_name
from plots import figure_for
from reporting import quartiles, ratios
from stages import STAGES, StagedTraining

CAPTION = """\
Median milliseconds of a training step without its optimizer. Devices are idle before and after each stage, so nothing
overlaps that could overlap in DataParallel. step is all of it, with the loss and letting go of the replicas; medians of
the parts do not add up to the median of the whole. step/by hand is the time of the step over that of the same chunks
one after the other on the first device, without the library: the median over the rounds, and their middle half.
Simulated devices are no accelerators: all of them compute on the CPU's cores. Their clocks were off."""


@dataclass(frozen=True)
class Row:
    """A model on a number of devices."""

    model: str
    device: str
    devices: int
    scatter_ms: float
    replicate_ms: float
    parallel_apply_ms: float
    gather_ms: float
    backward_ms: float
    step_ms: float
    over_by_hand: float
    over_by_hand_low: float
    over_by_hand_high: float

    def cells(self) -> dict[str, str]:
        return {
            "model": self.model,
            "device": self.device,
            "devices": str(self.devices),
            **{stage: f"{self.stage_ms(stage):.2f}" for stage in STAGES},
            "step": f"{self.step_ms:.1f}",
            "step/by hand": f"{self.over_by_hand:.2f}",
            "middle half": f"{self.over_by_hand_low:.2f} to {self.over_by_hand_high:.2f}",
        }

    def stage_ms(self, stage: str) -> float:
        return getattr(self, f"{stage}_ms")


def summarise(model: str, trainings: Sequence[StagedTraining]) -> list[Row]:
    """A row per training."""
    rows = []
    for training in trainings:
        milliseconds = {f"{name}_ms": 1e3 * statistics.median(training.seconds(name)) for name in (*STAGES, "step")}
        low, middle, high = quartiles(ratios(training.seconds("step"), training.seconds("by hand")))
        rows.append(
            Row(
                model=model,
                device=device_name(training.devices[0]),
                devices=len(training.devices),
                over_by_hand=middle,
                over_by_hand_low=low,
                over_by_hand_high=high,
                **milliseconds,
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """For each model its stages, stacked, over the number of devices."""
    models = list(dict.fromkeys(row.model for row in rows))
    with figure_for(path, (4.5 * len(models), 3.6), columns=len(models)) as figure:
        for axes, model in zip(figure.axes, models, strict=True):
            own = [row for row in rows if row.model == model]
            ticks = [str(row.devices) for row in own]
            below = [0.0] * len(own)
            for stage in STAGES:
                heights = [row.stage_ms(stage) for row in own]
                axes.bar(ticks, heights, bottom=below, width=0.6, label=stage)
                below = [a + b for a, b in zip(below, heights, strict=True)]
            by_hand = [row.step_ms / row.over_by_hand for row in own]
            axes.plot(ticks, by_hand, "k_", markersize=24, label="step by hand")
            axes.set_title(model)
            axes.set_xlabel(f"devices ({own[0].device})")
            axes.set_ylabel("milliseconds")
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.axes[0].legend(handles[::-1], labels[::-1], fontsize="small")
