"""Times pieces of work that take turns, and compares the times.

`alternate` is for two pieces of work, `take_turns` for any number. A `Comparison` is made of times that were taken in
pairs. This module does not know what is measured. Everything in `bench/` uses it that says how many times as fast one
thing is as another.

On a machine that does other things too, calls a second apart can be compared, but whole runs cannot. So the calls take
turns, each pair gives one ratio, and the median ratio is reported with a bootstrap interval. Whether a bar is reached
is answered only where the interval leaves no doubt.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from dataparallel.devices import all_devices
from reporting import Cell

PAIRS = 15
PAIRS_NEAR_ONE = 30
NEAR_ONE = 0.1
SHORT_PAIRS = 3
SHORT_WARMUP = 1

RESAMPLES = 10_000
CONFIDENCE = 0.95

Call = Callable[[], Any]
Verdict = Literal["yes", "no", "not decided"]


def pairs_for(bar: float | None) -> int:
    """How many pairs a ratio needs to be judged by ``bar``: twice as many where the bar is within 10 % of 1."""
    if bar is None or abs(bar - 1) > NEAR_ONE * (1 + 1e-9):
        return PAIRS
    return PAIRS_NEAR_ONE


@dataclass(frozen=True)
class Comparison:
    """The seconds of each pair, and the load average of the machine (over a minute, in processes) before and after.

    The ratio of a pair is ``theirs / ours``: how many times as fast ours is. `swapped` has the inverse ratio: how many
    times as long ours takes.

    Raises:
        ValueError: no pairs, times without a partner, or times that are not positive.
    """

    ours: list[float]
    theirs: list[float]
    load_before: float = math.nan
    load_after: float = math.nan

    def __post_init__(self) -> None:
        if not self.ours or len(self.ours) != len(self.theirs):
            raise ValueError(
                f"{len(self.ours)} and {len(self.theirs)} times: each needs its partner, one pair at least"
            )
        if not all(0 < seconds < math.inf for seconds in (*self.ours, *self.theirs)):
            raise ValueError(f"times have to be positive: ours {self.ours}, theirs {self.theirs}")

    @property
    def pairs(self) -> int:
        return len(self.ours)

    @property
    def ratios(self) -> list[float]:
        """Their time over ours, pair by pair."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """The median over the pairs."""
        return statistics.median(self.ratios)

    @property
    def low(self) -> float:
        """Where the 95 % interval of `ratio` begins."""
        return self._interval[0]

    @property
    def high(self) -> float:
        """Where the 95 % interval of `ratio` ends."""
        return self._interval[1]

    @property
    def swapped(self) -> Comparison:
        """The same pairs with ``ours / theirs`` as their ratio."""
        return Comparison(self.theirs, self.ours, self.load_before, self.load_after)

    def verdict(self, bar: float, at_least: bool = True) -> Verdict:
        """Whether the ratio is at least ``bar``, or with ``at_least=False`` at most.

        "not decided" where the bar lies in the interval, and where there are fewer pairs than `pairs_for` asks for.
        """
        if self.pairs < pairs_for(bar):
            return "not decided"
        if at_least:
            yes, no = self.low >= bar, self.high < bar
        else:
            yes, no = self.high <= bar, self.low > bar
        return "yes" if yes else "no" if no else "not decided"

    def row(self, bar: float | None = None, at_most: bool = False) -> dict[str, Any]:
        """What a report has of a comparison: see `CELLS`. With ``at_most`` the ratio is ours over theirs."""
        judged = self.swapped if at_most else self
        return {
            "ratio": judged.ratio,
            "ratio_low": judged.low,
            "ratio_high": judged.high,
            "pairs": self.pairs,
            "bar": bar,
            "at_most": at_most,
            "verdict": None if bar is None else judged.verdict(bar, not at_most),
            "load_before": self.load_before,
            "load_after": self.load_after,
        }

    @cached_property
    def _interval(self) -> tuple[float, float]:
        return bootstrap_interval(self.ratios)


CELLS: dict[str, Cell] = {
    "ratio": "{ratio:.2f}",
    "95 % interval": "{ratio_low:.2f} to {ratio_high:.2f}",
    "pairs": "{pairs}",
    "bar": lambda row: "" if row["bar"] is None else f"{'at most' if row['at_most'] else 'at least'} {row['bar']:g}",
    "reached": "{verdict}",
    "load": "{load_before:.1f} to {load_after:.1f}",
}
"""The columns of a table that has a comparison in each row."""


def milliseconds(seconds: Sequence[float]) -> float:
    """The median."""
    return 1e3 * statistics.median(seconds)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median of ``values``, which is the same at every call.

    Percentile bootstrap: B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    sample = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    medians = sample[picked].quantile(0.5, dim=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = medians.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def alternate(
    ours: Call,
    theirs: Call,
    pairs: int | None = None,
    warmup: int = 2,
    between: Call | None = None,
    *,
    bar: float | None = None,
    short: bool = False,
) -> Comparison:
    """Calls the two in turn. Which one begins changes from pair to pair.

    Args:
        ours, theirs: what is compared. Dropping what they return is part of their time.
        pairs: how many pairs. Default: what `pairs_for` says about ``bar``.
        warmup: how many pairs come before, without timing.
        between: called before each call, outside the timing.
        bar: what the ratio will be judged by, if anything.
        short: quick rather than meaningful: 3 pairs after 1, whatever ``pairs`` and ``warmup`` say.

    Raises:
        ValueError: fewer pairs than 15, or than 30 for a bar within 10 % of 1.
    """
    needed = pairs_for(bar)
    pairs = needed if pairs is None else pairs
    if pairs < needed:
        raise ValueError(f"pairs={pairs}: a bar of {bar} takes at least {needed}, or short=True for no verdict at all")
    load_before = load()
    our_times, their_times = take_turns([ours, theirs], pairs, warmup, between, short=short)
    return Comparison(our_times, their_times, load_before, load())


def take_turns(
    calls: Sequence[Call], rounds: int, warmup: int = 2, between: Call | None = None, *, short: bool = False
) -> list[list[float]]:
    """The seconds of each of ``calls`` in each round. All of them have a turn in a round; each round another begins.

    A call is timed from idle devices to idle devices. It begins after a full garbage collection, and the collector
    stays on: a call pays for collecting its own objects, and not for those that the call before has left. What exists
    at the start is frozen meanwhile (`gc.freeze`), so that no call pays for visiting the rest of the process.
    """
    if short:
        rounds, warmup = SHORT_PAIRS, SHORT_WARMUP
    devices = all_devices()
    seconds: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.freeze()
    try:
        for number in range(-warmup, rounds):
            for k in range(len(calls)):
                turn = (number + k) % len(calls)
                if between is not None:
                    between()
                gc.collect()
                taken = _time(calls[turn], devices)
                if number >= 0:
                    seconds[turn].append(taken)
    finally:
        gc.unfreeze()
    return seconds


def load() -> float:
    """The load average of the machine over the last minute, in processes. NaN where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan


def _time(call: Call, devices: Sequence[torch.device]) -> float:
    _wait_for(devices)
    start = time.perf_counter()
    call()
    _wait_for(devices)
    return time.perf_counter() - start


def _wait_for(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.accelerator.synchronize(device)
