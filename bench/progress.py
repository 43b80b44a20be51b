"""A progress bar on the terminal while a benchmark measures. Without a terminal nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from tqdm import tqdm

Progress = Callable[[str, int], AbstractContextManager["tqdm[None]"]]


def progress_of(config: pytest.Config, capsys: pytest.CaptureFixture[str]) -> Progress:
    """A function that takes what is done and the number of its steps; its context gives a bar with ``update``.

    The bar has a line of its own, because pytest has begun one with the name of the file. It is removed at the end.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # pytest-xdist's worker processes have none

    @contextmanager
    def progress(what: str, steps: int) -> Iterator[tqdm[None]]:
        with capsys.disabled():
            shown = reporter is not None and sys.stderr.isatty()
            if shown:
                reporter.ensure_newline()
            with tqdm(total=steps, desc=what, disable=not shown, leave=False) as bar:
                yield bar

    return progress
