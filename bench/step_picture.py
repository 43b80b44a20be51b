"""Draws the picture of the front page: ``python bench/step_picture.py [FILE]``, by default ``results/step.png``.

A training step of GPT-2 small by ``torch.nn.DataParallel`` and by ``DataParallel``, as `timelines` predicts it for
8 x A100. Of two steps in a row the second one is drawn, so a band is as long as the step that the tables name. Nothing
is measured. Recording takes half a minute, and the simulated devices are compiled on first use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nogpu import simulate
from nogpu.timeline import HOST, Launch, Schedule, schedule
from nogpu.timeline.presets import A100
from plots import figure_for
from recorded import Recorded
from shapes import GPT2_SMALL
from timelines import DEVICES, TORCH, WRAPPER, recorded

PICTURE = Path(__file__).parent / "results" / "step.png"

COPY, FORWARD, BACKWARD = "copies between devices", "forward", "backward"
SUM, OPTIMIZER = "sums of gradients", "optimizer"
COLORS = {COPY: "#e8912d", FORWARD: "#8fbbe3", BACKWARD: "#2f68a8", SUM: "#c23b4e", OPTIMIZER: "#7a5aa6"}
IDLE, INK = "#eceef1", "#20242a"
BANDS = {TORCH: "torch.nn.DataParallel, without NCCL", WRAPPER: "dataparallel"}
NOTES = {
    TORCH: ((9.2, "device 0\nsends weights,\nthe others wait"), (83.5, "device 0\nsums gradients,\nthe others wait")),
    WRAPPER: ((77.5, "all devices send and sum,\nmost of it while they compute"),),
}
"""What stands at a part of a band, and where its middle is, in milliseconds."""

FINEST = 0.1
"""Shorter gaps between bars are not drawn: they would be narrower than a pixel. In milliseconds."""

Bars = dict[tuple[int, str], list[tuple[float, float]]]
"""For each device and part of the step, when it begins and ends: milliseconds from the beginning of the step."""


def part_of(launch: Launch) -> str:
    """The part of the step that a launch belongs to.

    Sums are additions of what has no more dimensions than a parameter, with the work of making buckets. Activations
    have three.
    """
    of_weights = all(len(shape) < 3 for shape in launch.shapes)
    if launch.copy is not None:
        return COPY
    if launch.op.startswith("aten::_foreach"):
        return OPTIMIZER
    if launch.op in ("aten::add", "aten::add_", "aten::cat") and of_weights:
        return SUM if launch.in_backward else COPY
    return BACKWARD if launch.in_backward else FORWARD


def places_of(launch: Launch, planned: Schedule) -> Iterator[int]:
    """The devices that a launch is drawn at: a copy at both of its ends."""
    yield from {planned.recording.streams[launch.stream].device, *(launch.copy or ())} - {HOST}


def bars_of(found: Recorded) -> tuple[float, Bars]:
    """Milliseconds of the second of two steps, and what each device does in it."""
    both = schedule(found.two, A100)
    begin = 1e3 * schedule(found.one, A100).time
    length = 1e3 * both.time - begin
    bars: Bars = {}
    for launch in sorted(both.recording.launches, key=lambda launch: both.start[launch.index]):
        start, end = (1e3 * times[launch.index] - begin for times in (both.start, both.end))
        if end <= 0:
            continue
        for device in places_of(launch, both):
            add(bars.setdefault((device, part_of(launch)), []), max(start, 0.0), end)
    return length, bars


def add(bars: list[tuple[float, float]], start: float, end: float) -> None:
    """Adds a bar that begins no earlier than the last one, or makes the last one longer."""
    if bars and start - bars[-1][1] < FINEST:
        start, last = bars.pop()
        end = max(end, last)
    bars.append((start, end))


def draw(steps: Mapping[str, tuple[float, Bars]], path: Path) -> None:
    """A band for each way, a row for each device: what it computes, and below it, thinner, what it sends or gets."""
    from matplotlib.patches import Patch

    longest = max(length for length, _ in steps.values())
    with figure_for(path, (9.2, 5.4), rows=len(steps), sharex=True) as figure:
        for axes, (way, (length, bars)) in zip(figure.axes, steps.items(), strict=True):
            draw_band(axes, way, length, bars, longest)
        figure.axes[-1].set_xlabel("milliseconds (predicted, not measured)", fontsize=11, color=INK)
        handles = [Patch(color=color, label=name) for name, color in {**COLORS, "idle": IDLE}.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=10)
        figure.suptitle("One training step of GPT-2 small on 8 A100, predicted", fontsize=14, color=INK)


def draw_band(axes: Any, way: str, length: float, bars: Bars, longest: float) -> None:
    for device in range(DEVICES):
        axes.broken_barh([(0, length)], (device - 0.42, 0.84), facecolors=IDLE, linewidth=0)
    for (device, part), spans in bars.items():
        low, height = (device + 0.2, 0.22) if part == COPY else (device - 0.42, 0.6)
        axes.broken_barh([(a, b - a) for a, b in spans], (low, height), facecolors=COLORS[part], linewidth=0)
    axes.set_title(f"{BANDS[way]}: {length:.1f} ms", loc="left", fontsize=13, color=INK, fontweight="bold")
    for middle, text in NOTES.get(way, ()):
        box = {"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 2}
        axes.text(middle, 4, text, ha="center", va="center", fontsize=11, color=INK, bbox=box)
    axes.set_yticks(range(DEVICES), [f"device {device}" if device in (0, 7) else "" for device in range(DEVICES)])
    axes.tick_params(length=0, labelsize=10.5, labelcolor=INK)
    axes.set_ylim(DEVICES - 0.5, -0.5)
    axes.set_xlim(0, longest)
    for side in axes.spines.values():
        side.set_visible(False)


def main(path: Path) -> None:
    devices = simulate(DEVICES, compute=False)
    steps = {way: bars_of(recorded(way, GPT2_SMALL, devices)) for way in BANDS}
    draw(steps, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
