"""How the benchmarks draw: one figure for each file, made without a display."""

from __future__ import annotations

from collections.abc import Iterator
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
