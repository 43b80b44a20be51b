"""How the benchmarks draw: one figure for each file, made without a display."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def figure_for(path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **more: Any) -> Iterator[Any]:
    """Gives the figure, whose axes are in ``figure.axes``, row by row, and writes it to ``path`` at the end.

    ``size`` is in inches. What else there is goes to ``pyplot.subplots``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, _ = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **more)
    try:
        yield figure
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def draw_lines(
    axes: Any, lines: Iterable[tuple[str, Sequence[float], Sequence[float], str]], title: str, x: str, y: str
) -> None:
    """Lines from 0 upwards: each has a label, its numbers and a style."""
    for label, numbers, heights, style in lines:
        axes.plot(numbers, heights, style, markersize=4, label=label)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
