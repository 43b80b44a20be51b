"""A recorder that records, and one that a test fills by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from dataparallel.tracing.recorder import Recorder, Span, Thread, Wait, start, stop


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """It records while the test runs."""
    recorder = Recorder()
    start(recorder)
    yield recorder
    stop(recorder)


class ByHand(Recorder):
    """Times are milliseconds. Threads are named by numbers; 0 is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = {0: self.caller}

    def thread(self, number: int) -> Thread:
        return self.threads.setdefault(number, Thread(number, f"thread {number}"))

    def span(
        self,
        name: str,
        start: float,
        end: float,
        *,
        thread: int = 0,
        ran: float | None = None,
        core: float | None = 0.0,
        detail: str = "",
        slot: int | None = None,
        call: int = -1,
    ) -> ByHand:
        """A range, which ran all the time by default."""
        if slot is not None:
            self.devices.setdefault(slot, torch.device("cpu"))
        ran = end - start if ran is None else ran
        wait = None if core is None else round(1e6 * core)
        times = round(1e6 * start), round(1e6 * end), round(1e6 * ran), wait
        self.spans.append(Span(name, detail, slot, call, self.thread(thread), *times, None))
        return self

    def wait(self, slot: int, start: float, end: float, call: int = 0) -> ByHand:
        """A slot had no permit."""
        self.devices.setdefault(slot, torch.device("cpu"))
        self.waits.append(Wait(call, slot, round(1e6 * start), round(1e6 * end)))
        return self


@pytest.fixture
def by_hand() -> Callable[[], ByHand]:
    """Makes a recorder to be filled."""
    return ByHand
