"""`text_of`: the rows of a trace as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from dataparallel.tracing.rows import Row


def text_of(rows: Sequence[Row], seconds: float, behind: float, advice: Sequence[str]) -> str:
    """The table of a block. ``behind``: for how long the host waited for devices when the block had ended."""
    cells = [["stage", "replica", "calls", "host ms", "%", "device ms", "waiting ms"]]
    for row in rows:
        name = row.stage if row.replica is None else ""
        replica = "" if row.replica is None else f"{row.replica}" if row.on is None else f"{row.replica} on {row.on}"
        share = f"{100 * row.host / seconds:.1f}" if row.replica is None else ""
        cells.append([name, replica, str(row.calls or ""), _ms(row.host), share, _ms(row.device), _ms(row.waiting)])
    cells.append(["the block", "", "", _ms(seconds), "100.0", "", _ms(behind)])
    timed = {row.stage for row in rows if row.device is not None}
    if timed - {"forward"}:
        device = "the kernels' time, added up, by the profiler"
    elif timed:
        device = "from before each replica's forward to after it, by events; the profile has no kernels"
    else:
        device = "not known, or CPU slots"
    notes = [f"device: {device}", "waiting: until a replica's turn came; in the last row for devices, after the block"]
    return "\n".join([aligned(cells, words=(0, 1)), *notes, *(f"to try: {sentence}" for sentence in advice)])


def aligned(rows: Iterable[Sequence[str]], words: Collection[int] = (0,)) -> str:
    """Rows as lines, in columns of the same width. Columns of `words` begin at the left, others end at the right."""
    lines = [*rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.2f}"
