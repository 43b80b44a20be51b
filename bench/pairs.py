"""Two pieces of work timed in turn, and what their times say about each other.

`alternate` is for two, `take_turns` for any number; a `Comparison` is made of times that were taken in pairs. Knows
nothing of what is measured. It is for everything in `bench/` that says how many times faster one thing is than another.

On a machine that does other things too, calls a second apart can be compared and whole runs cannot. So the calls take
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
    """How many pairs it takes to tell on which side of ``bar`` a ratio is: twice as many within 10 % of 1."""
    if bar is None or abs(bar - 1) > NEAR_ONE * (1 + 1e-9):
        return PAIRS
    return PAIRS_NEAR_ONE


@dataclass(frozen=True)
class Comparison:
    """Seconds of each pair, and the machine's load average (of a minute, in processes) before and after.

    The ratio of a pair is ``theirs / ours``: how many times faster ours is. `swapped` has it the other way round, how
    many times as long ours takes.

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
        """Pair by pair: their time over ours."""
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

        "not decided" where the interval straddles the bar, and where there are fewer pairs than `pairs_for` asks for.
        """
        if self.pairs < pairs_for(bar):
            return "not decided"
        if at_least:
            yes, no = self.low >= bar, self.high < bar
        else:
            yes, no = self.high <= bar, self.low > bar
        return "yes" if yes else "no" if no else "not decided"

    def __str__(self) -> str:
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @cached_property
    def _interval(self) -> tuple[float, float]:
        return bootstrap_interval(self.ratios)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median of ``values``, the same one at every call.

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
    """Calls the two in turn; which goes first changes from pair to pair.

    Args:
        ours, theirs: what is compared. What they return is dropped within their time.
        pairs: default: what `pairs_for` says about ``bar``.
        warmup: how many pairs go before, untimed.
        between: called before each call, outside the timing.
        bar: what the ratio will be judged by, if by anything.
        short: quick rather than meaningful: 3 pairs after 1, whatever ``pairs`` and ``warmup`` are.

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
    """The seconds of each of ``calls`` in each round, in which all have their turn; who begins moves on by one.

    Times go from devices that are idle to devices that are idle again. Each call begins after a full garbage
    collection, and the collector stays on: what a call's objects cost the collector is a cost of the call, what the one
    before has left is none of its. What exists at the start is frozen meanwhile (`gc.freeze`), so that neither pays
    for walking through the rest of the process.
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
    """The machine's load average over the last minute, in processes; NaN where the system has none."""
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
