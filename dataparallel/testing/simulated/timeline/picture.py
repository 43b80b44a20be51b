"""A schedule as a picture: a row for each thread of the host and for each stream. It needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Iterable

from dataparallel.testing.simulated.timeline.answers import Answers
from dataparallel.testing.simulated.timeline.names import by_device, name_of_stream

__all__ = ["draw"]

KERNEL, COPY, WAIT, ISSUE = "#3b6fb6", "#e08b2c", "#d9d9d9", "#5d9b6b"
LEGEND = {"kernel": KERNEL, "copy between two places": COPY, "waits for a stream or a link": WAIT, "host issues": ISSUE}

Bars = list[tuple[float, float]]
"""Start and length of each bar, in milliseconds."""


def draw(answers: Answers, path: str | os.PathLike[str]) -> None:
    """Writes the picture. `Schedule.plot` says how it is called."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise RuntimeError("plot draws with matplotlib, which is not installed: pip install matplotlib") from error
    rows = [*_threads(answers), *_streams(answers)]
    # Without pyplot: no window, and nothing that outlives the call.
    figure = Figure(figsize=(14, 1.6 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for position, (_, bars) in enumerate(rows):
        for color, spans in bars.items():
            is_wait = color == WAIT
            # Waits lie behind the launches and are lower, so that both are seen.
            low, height = (position - 0.15, 0.3) if is_wait else (position - 0.4, 0.8)
            axes.broken_barh(spans, (low, height), facecolors=color, linewidth=0, zorder=1 if is_wait else 2)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first row is at the top
    axes.set_xlim(0, 1e3 * answers.time or 1.0)
    axes.set_xlabel("ms")
    axes.set_title(f"A prediction for {answers.machine.name}: {1e3 * answers.time:.2f} ms", fontsize=10)
    handles = [Patch(color=color, label=label) for label, color in LEGEND.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(LEGEND), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _threads(answers: Answers) -> Iterable[tuple[str, dict[str, Bars]]]:
    solution = answers.solution
    for thread in answers.threads:
        spans = [
            _bar(solution.issue[launch.index], solution.reached[launch.index])
            for launch in answers.recording.launches
            if launch.thread == thread.number
        ]
        yield f"host thread {thread.number}", {ISSUE: spans}


def _streams(answers: Answers) -> Iterable[tuple[str, dict[str, Bars]]]:
    solution = answers.solution
    rows: list[dict[str, Bars]] = [{WAIT: [], KERNEL: [], COPY: []} for _ in answers.recording.streams]
    for launch in answers.recording.launches:
        row = rows[launch.stream]
        ready, start, end = (times[launch.index] for times in (solution.ready, solution.start, solution.end))
        row[KERNEL if launch.copy is None else COPY].append(_bar(start, end))
        if start > ready:
            row[WAIT].append(_bar(ready, start))
    for position in by_device(answers.recording.streams):
        if answers.streams[position].launches:
            yield name_of_stream(answers.recording.streams[position]), rows[position]


def _bar(start: float, end: float) -> tuple[float, float]:
    return 1e3 * start, 1e3 * (end - start)
