"""The statistics that the benchmarks report, on known times. Nothing is timed here."""

from __future__ import annotations

import gc
import statistics
from itertools import product

import pytest

import pairs
from pairs import Comparison, alternate, bootstrap_interval, pairs_for

TIMES = [1.0, 1.1, 0.9, 1.05, 0.95] * 3


def compared(ratio: float, pairs: int = 15) -> Comparison:
    ours = (TIMES * 2)[:pairs]
    return Comparison(ours, [ratio * seconds for seconds in ours])


def spread(*ratios: float) -> Comparison:
    return Comparison([1.0] * len(ratios), list(ratios))


class TestComparison:
    def test_ratio_is_their_time_over_ours(self) -> None:
        assert compared(2.5).ratio == pytest.approx(2.5)
        assert compared(2.5).swapped.ratio == pytest.approx(0.4)

    def test_ratio_is_taken_pair_by_pair(self) -> None:
        """A machine that becomes ten times slower half-way does not change the ratio."""
        slower = [1.0] * 8 + [10.0] * 7
        assert Comparison(slower, [3 * seconds for seconds in slower]).ratio == pytest.approx(3)

    @pytest.mark.parametrize(
        ("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0]), ([float("nan")], [1.0])]
    )
    def test_times_that_mean_nothing(self, ours: list[float], theirs: list[float]) -> None:
        with pytest.raises(ValueError, match="times"):
            Comparison(ours, theirs)


class TestInterval:
    def test_of_medians_as_they_are_distributed(self) -> None:
        """All 27 samples of three values are the distribution that the bootstrap draws from."""
        values = [1.0, 2.0, 4.0]
        medians = [statistics.median(sample) for sample in product(values, repeat=3)]
        assert medians.count(1.0) / 27 > 0.025 < medians.count(4.0) / 27  # so both ends are in the interval
        assert bootstrap_interval(values) == (1, 4)


class TestVerdict:
    @pytest.mark.parametrize(
        ("ratio", "at_least", "verdict"),
        [(2.5, True, "yes"), (1.5, True, "no"), (2.5, False, "no"), (1.5, False, "yes")],
    )
    def test_clear(self, ratio: float, at_least: bool, verdict: str) -> None:
        assert compared(ratio).verdict(2.0, at_least) == verdict

    @pytest.mark.parametrize("at_least", [True, False])
    def test_straddling(self, at_least: bool) -> None:
        assert spread(*[1.8, 2.2] * 8).verdict(2.0, at_least) == "not decided"

    @pytest.mark.parametrize(("bar", "needed"), [(0.9, 30), (1.03, 30), (1.1, 30), (0.89, 15), (1.15, 15), (2.5, 15)])
    def test_near_one_takes_more_pairs(self, bar: float, needed: int) -> None:
        assert pairs_for(bar) == needed
        assert compared(5, pairs=needed).verdict(bar) == "yes"
        assert compared(5, pairs=needed - 1).verdict(bar) == "not decided"


class TestTurns:
    def test_who_goes_first_alternates(self) -> None:
        calls: list[str] = []
        alternate(lambda: calls.append("ours"), lambda: calls.append("theirs"), warmup=0)
        assert calls[:4] == ["ours", "theirs", "theirs", "ours"]
        assert len(calls) == 30

    def test_times_go_to_who_took_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [0.0]
        monkeypatch.setattr(pairs.time, "perf_counter", lambda: clock[0])

        def takes(seconds: float) -> None:
            clock[0] += seconds

        compared = alternate(lambda: takes(1), lambda: takes(4), between=lambda: takes(100))
        assert compared.ours == [1] * 15
        assert compared.theirs == [4] * 15

    def test_warm_up_is_not_timed(self) -> None:
        calls: list[str] = []
        compared = alternate(lambda: calls.append("ours"), lambda: calls.append("theirs"), warmup=2)
        assert calls.count("ours") == calls.count("theirs") == 17
        assert compared.pairs == 15

    def test_between_comes_before_every_call(self) -> None:
        calls: list[str] = []
        alternate(*[lambda: calls.append("call")] * 2, between=lambda: calls.append("between"))
        assert calls == ["between", "call"] * 34

    @pytest.mark.parametrize(("count", "bar"), [(14, None), (14, 2.5), (29, 1.03)])
    def test_fewer_pairs_are_refused(self, count: int, bar: float | None) -> None:
        with pytest.raises(ValueError, match="at least"):
            alternate(int, int, count, bar=bar)

    def test_short_decides_nothing(self) -> None:
        compared = alternate(int, int, short=True)
        assert compared.pairs == 3
        assert compared.verdict(1e-9) == "not decided"

    def test_collector_stays_on_and_is_unfrozen(self) -> None:
        seen: list[bool] = []
        before = gc.get_freeze_count()

        def fails() -> None:
            seen.append(gc.isenabled() and gc.get_freeze_count() > before)
            raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            alternate(fails, fails)
        assert seen == [True]
        assert gc.get_freeze_count() == 0
