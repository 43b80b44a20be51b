"""The results as text: tables that are readable as they stand, and the largest cost in words as the last line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dataparallel.tracing.advice import advice
from dataparallel.tracing.results import Results

__all__ = ["text_of"]

_SHOWN = 0.05
"""A wait for devices after the block that is shorter than this part of it is not worth a line."""


def text_of(found: Results, cost: float) -> str:
    """All tables. ``cost``: about how many seconds recording took."""
    parts = [
        _head(found),
        _stages(found),
        _slots(found),
        _sent(found),
        _memory(found),
        f"Recording took about {1e3 * cost:.1f} ms of this, for {found.records} records in all threads.",
        advice(found),
    ]
    return "\n\n".join(parts)


def _head(found: Results) -> str:
    steps = f", {found.steps} steps of {_ms(found.seconds / found.steps)} ms" if found.steps > 1 else ""
    modules = ", ".join(f"{count} of {name}" for name, count in found.modules.items()) or "none on several slots"
    forms = f", by {' and '.join(found.forms)}" if found.forms else ""
    text = f"{_ms(found.seconds)} ms{steps}; calls: {modules}{forms}"
    if found.behind > 0.01 * found.seconds:
        text += f"\nWhen the block had ended, the host waited {_ms(found.behind)} ms more for the devices."
    return text


def _stages(found: Results) -> str:
    steps = max(found.steps, 1)
    rows = [["stage", "calls", "ms", "%", "ms a step", "ran", "no core", "other threads"]]
    for stage in found.stages:
        rows.append(
            [
                stage.name,
                str(stage.calls or ""),
                _ms(stage.seconds),
                f"{100 * stage.seconds / found.seconds:.1f}",
                _ms(stage.seconds / steps),
                "" if stage.running is None else _ms(stage.running),
                "" if stage.no_core is None else _ms(stage.no_core),
                _ms(stage.elsewhere) if stage.elsewhere else "",
            ]
        )
    total = sum(stage.seconds for stage in found.stages)
    sums = ["all", "", _ms(total), f"{100 * total / found.seconds:.1f}", _ms(total / steps), "", "", ""]
    return "The calling thread, without ranges inside ranges:\n" + _table([*rows, sums])


def _slots(found: Results) -> str:
    if not found.slots:
        return "No replica ran: one slot needs none, and stages that a subclass overrides are not looked into."
    has_times = any(slot.device_forward is not None for slot in found.slots)
    head = ["slot", "device", "calls", "forward ms", "ran", "no permit", "no core", "lock, at most"]
    rows = [head + ["on the device: forward", "backward"] * has_times]
    for slot in found.slots:
        row = [str(slot.slot), str(slot.device), str(slot.calls)]
        row += map(_ms, (slot.forward, slot.running, slot.no_permit))
        row += ["?" if slot.no_core is None else _ms(slot.no_core), _ms(slot.lock)]
        if has_times:
            row += ["" if t is None else _ms(t) for t in (slot.device_forward, slot.device_backward)]
        rows.append(row)
    waiting = sum(slot.no_permit for slot in found.slots), sum(slot.lock for slot in found.slots)
    return (
        "Replicas:\n"
        + _table(rows)
        + f"\nWithout waits the slowest replica of a call takes {found.imbalance:.2f} times the mean. All together had "
        + f"no permit for {_ms(waiting[0])} ms, and waited for Python's lock for {_ms(waiting[1])} ms at most."
    )


def _sent(found: Results) -> str:
    if not found.sent:
        return "Nothing was sent between devices."
    steps = max(found.steps, 1)
    rows = [["stage", "route", "copies a step", "bytes a step", "most between"]]
    for sent in found.sent:
        source, target = sent.busiest
        copies, size = sent.copies / steps, round(sent.number_of_bytes / steps)
        rows.append([sent.stage, sent.route, f"{copies:.1f}", f"{size:,}", f"{source} and {target}"])
    return "Sent between devices:\n" + _table(rows)


def _memory(found: Results) -> str:
    if not found.memory:
        return "Memory: no figure. Nobody counts host memory for CPU slots."
    rows = [["device", "slots", "before, MiB", "after", "at most"]]
    for memory in found.memory:
        sizes = [f"{size / 2**20:.1f}" for size in (memory.before, memory.after, memory.peak)]
        rows.append([str(memory.device), " ".join(map(str, memory.slots)), *sizes])
    return "Memory of tensors:\n" + _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of the same width: the first one begins at the left, and the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Iterable[str], widths: Sequence[int]) -> str:
    (name, width), *others = zip(row, widths, strict=True)
    return "  ".join([name.ljust(width), *(cell.rjust(width) for cell, width in others)]).rstrip()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"
