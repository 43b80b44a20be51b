"""`draw` writes the timeline of a trace as a picture, and `save` as a file for Perfetto.

Both have the same rows: the caller, each slot, sums, and each other thread with ranges. Times are seconds from the
beginning of the block.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dataparallel.tracing import perfetto
from dataparallel.tracing.recorder import Gradients, Recorder, Span, Thread
from dataparallel.tracing.results import stage_of

NO_PERMIT = "no permit"
OF_SLOT = "backward of the replica"


@dataclass(frozen=True)
class Bar:
    """A range as it is drawn, with its stage and its name in words. Bars of a row may be nested."""

    stage: str
    name: str
    start: float
    end: float


@dataclass
class Row:
    """A row and its title."""

    title: str
    bars: list[Bar] = field(default_factory=list)


def rows_of(recorder: Recorder, begin: int) -> list[Row]:
    """All rows, the caller's first. ``begin``: when the block began."""
    caller = Row(f"caller ({recorder.caller.name})")
    slots = {slot: Row(f"slot {slot} ({device})") for slot, device in sorted(recorder.devices.items())}
    sums = Row("sums")
    others: dict[Thread, Row] = {}

    def at(time: int) -> float:
        return 1e-9 * (time - begin)

    for each in sorted(recorder.spans, key=lambda each: (each.start, -each.end)):
        bar = Bar(stage_of(each.name), _name(each), at(each.start), at(each.end))
        if bar.stage == "sums":
            sums.bars.append(bar)
        if each.slot is not None:
            slots.setdefault(each.slot, Row(f"slot {each.slot}")).bars.append(bar)
        if each.thread == recorder.caller:
            caller.bars.append(bar)
        elif each.slot is None and bar.stage != "sums":
            others.setdefault(each.thread, Row(each.thread.name)).bars.append(bar)
    for wait in recorder.waits:
        slots[wait.slot].bars.append(Bar(NO_PERMIT, NO_PERMIT, at(wait.start), at(wait.end)))
    for slot, bar in _backward_of_slots(recorder, at):
        slots[slot].bars.append(bar)
    return [caller, *slots.values(), sums, *others.values()]


def _name(span: Span) -> str:
    if span.name == "replica":
        return f"forward of {span.detail}"
    return f"{stage_of(span.name)} ({span.detail})" if span.detail else stage_of(span.name)


def _backward_of_slots(recorder: Recorder, at: Callable[[int], float]) -> list[tuple[int, Bar]]:
    """For each backward pass and slot a bar, from the first copy of outputs' gradients to the slot's last gradients.

    There are none if one thread runs the whole pass, as on the CPU: the pass is in the caller's row then.
    """
    marks = [*recorder.marks]
    # The units of `fully_shard` deliver in ranges of their own.
    delivered = [span for span in recorder.spans if span.name == "reduce_add"]
    marks += [Gradients(span.slot, span.thread, span.end) for span in delivered if span.slot is not None]
    sent = [copy.time for copy in recorder.copies if copy.stage == "backward"]
    found = []
    for span in recorder.spans:
        if span.name != "backward":
            continue
        inside = [mark for mark in marks if span.start <= mark.time <= span.end]
        if len({mark.thread for mark in inside}) < 2:
            continue
        begin = min([time for time in sent if span.start <= time <= span.end], default=span.start)
        last: dict[int, int] = defaultdict(int)
        for mark in inside:
            last[mark.slot] = max(last[mark.slot], mark.time)
        found += [(slot, Bar("backward", OF_SLOT, at(begin), at(end))) for slot, end in last.items()]
    return found


COLORS = {
    "scatter": "#8c6bb1",
    "replicate": "#e08b2c",
    "forward": "#3b6fb6",
    "unshard": "#c9a227",
    "gather": "#6fa8dc",
    "backward": "#5d9b6b",
    "sums": "#c0504d",
    "optimizer": "#7f7f7f",
    NO_PERMIT: "#e6e6e6",
}
OTHER = "#444444"


def draw(recorder: Recorder, begin: int, seconds: float, path: str | os.PathLike[str], title: str) -> None:
    """Writes the picture of the block, which began at ``begin`` and took so many seconds.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise RuntimeError("plot draws with matplotlib, which is not installed: pip install matplotlib") from error
    rows = rows_of(recorder, begin)
    # Without pyplot: no window, and nothing that outlives the call.
    figure = Figure(figsize=(12, 1.5 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    shown: dict[str, str] = {}
    for position, row in enumerate(rows):
        # Ranges inside of others come later, and are drawn over them. A slot's backward is behind all else.
        for bar in sorted(row.bars, key=lambda bar: (bar.name != OF_SLOT, bar.start, -bar.end)):
            color = shown[bar.stage] = COLORS.get(bar.stage, OTHER)
            low, height = (position - 0.12, 0.24) if bar.stage == NO_PERMIT else (position - 0.4, 0.8)
            lasts = 1e3 * bar.start, 1e3 * (bar.end - bar.start)
            axes.broken_barh([lasts], (low, height), facecolors=color, edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first row is at the top
    axes.set_xlim(0, 1e3 * seconds or 1.0)
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10)
    order = [stage for stage in [*COLORS, *shown] if stage in shown]
    handles = [Patch(color=shown[stage], label=stage) for stage in dict.fromkeys(order)]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


_HOST, _COPIES = 0, 1
"""Processes: the rows, and the copies."""


def save(recorder: Recorder, begin: int, path: str | os.PathLike[str]) -> None:
    """Writes the file. ``begin``: when the block began."""
    events = [*_events_of_rows(rows_of(recorder, begin)), *_events_of_copies(recorder, begin)]
    perfetto.write(path, events, {"times": "measured on the host; copies are shown where they were launched"})


def _events_of_rows(rows: list[Row]) -> Iterator[perfetto.Event]:
    yield perfetto.name("process_name", _HOST, 0, "dataparallel")
    for thread, row in enumerate(rows):
        yield perfetto.name("thread_name", _HOST, thread, row.title)
        for bar in row.bars:
            about = {"ph": "X", "cat": bar.stage, "name": bar.name, "pid": _HOST, "tid": thread}
            yield {**about, **perfetto.span(bar.start, bar.end)}


def _events_of_copies(recorder: Recorder, begin: int) -> Iterator[perfetto.Event]:
    pairs = {pair: i for i, pair in enumerate(sorted({(str(c.source), str(c.target)) for c in recorder.copies}))}
    if pairs:
        yield perfetto.name("process_name", _COPIES, 0, "copies, launched")
    for (source, target), thread in pairs.items():
        yield perfetto.name("thread_name", _COPIES, thread, f"{source} to {target}")
    for copy in recorder.copies:
        about = {"bytes": copy.number_of_bytes, "stage": stage_of(copy.stage)}
        row = {"pid": _COPIES, "tid": pairs[str(copy.source), str(copy.target)]}
        time = perfetto.microseconds(1e-9 * (copy.time - begin))
        yield {"ph": "i", "s": "t", "cat": "copy", "name": copy.route, "args": about, "ts": time, **row}
