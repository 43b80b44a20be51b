"""A trace as a picture: the rows of a timeline. It needs matplotlib."""

from __future__ import annotations

import os

from dataparallel.tracing.recorder import Recorder
from dataparallel.tracing.rows import NO_PERMIT, OF_SLOT, rows_of

__all__ = ["draw"]

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
            span = 1e3 * bar.start, 1e3 * (bar.end - bar.start)
            axes.broken_barh([span], (low, height), facecolors=color, edgecolor="white", linewidth=0.2)
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
