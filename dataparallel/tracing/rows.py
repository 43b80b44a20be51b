"""The rows of a timeline: the caller, a row for each slot, one for sums, and one for each other thread with ranges.

The picture and the file for Perfetto show the same rows. Times are seconds from the beginning of the block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from dataparallel.tracing.recorder import Gradients, Recorder, Span, Thread
from dataparallel.tracing.results import stage_of

__all__ = ["NO_PERMIT", "OF_SLOT", "Bar", "Row", "rows_of"]

NO_PERMIT = "no permit"
OF_SLOT = "backward of the replica"


@dataclass(frozen=True)
class Bar:
    """A range: its stage, its name in words, and when. Bars of a row may lie inside of each other."""

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

    for span in sorted(recorder.spans, key=lambda span: (span.start, -span.end)):
        bar = Bar(stage_of(span.name), _name(span), at(span.start), at(span.end))
        if bar.stage == "sums":
            sums.bars.append(bar)
        if span.slot is not None:
            slots.setdefault(span.slot, Row(f"slot {span.slot}")).bars.append(bar)
        if span.thread == recorder.caller:
            caller.bars.append(bar)
        elif span.slot is None and bar.stage != "sums":
            others.setdefault(span.thread, Row(span.thread.name)).bars.append(bar)
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
    """In a backward pass from where the gradients of outputs are sent to the slots to the last gradients of each slot.

    Only if slots have threads of their own. On the CPU one thread runs the whole pass, in the caller's row. What comes
    before is the backward of the loss.
    """
    marks = [*recorder.marks]
    # The units of `fully_shard` deliver in ranges of their own.
    delivered = [span for span in recorder.spans if span.name == "reduce_add"]
    marks += [Gradients(span.slot, span.thread, span.end) for span in delivered if span.slot is not None]
    found = []
    for span in recorder.spans:
        if span.name != "backward":
            continue
        inside = [mark for mark in marks if span.start <= mark.time <= span.end]
        if len({mark.thread for mark in inside}) < 2:
            continue
        sent = [copy.time for copy in recorder.copies if copy.stage == "backward"]
        begin = min([time for time in sent if span.start <= time <= span.end], default=span.start)
        last: dict[int, int] = defaultdict(int)
        for mark in inside:
            last[mark.slot] = max(last[mark.slot], mark.time)
        found += [(slot, Bar("backward", OF_SLOT, at(begin), at(end))) for slot, end in last.items()]
    return found
