"""From the times of calls with different splits of the batch to a table: the chosen split beside the best fixed one.

Does not know how the times were taken, and measures nothing itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pairs import Comparison, Verdict

CAPTION = """\
One of 4 slots is 3 times slower than the others: for each sample its layers sleep 3 times as long. With
chunk_sizes="balanced" the library chooses how 32 samples are split, in 20 calls before the timing. The table has median
milliseconds of a call after that, of calls with equal chunks, and of calls with the best fixed split. Calls of the
three take turns. Simulated devices are no accelerators: all of them compute on the CPU's cores. Their clocks were off.

best
    Of 14 splits that were tried in turns, the one with the smallest median: the slow slot has 1 to 14 samples, and the
    others share the rest.
chosen/best
    The time with the chosen split over that with the best one, pair by pair: the median and its bootstrap 95 %
    interval. It should be at most 1.1.

Where it says "in turn", replicas on the CPU run one after the other, as they do while gradients are recorded. There the
backward runs in one thread in any case."""

BAR = 1.1


@dataclass(frozen=True)
class Row:
    """One kind of work on one kind of devices."""

    form: str
    devices: str
    work: str
    pairs: int
    equal_ms: float
    best_ms: float
    chosen_ms: float
    best: str
    chosen: str
    over_best: float
    over_best_low: float
    over_best_high: float
    bar: float
    verdict: Verdict
    load_before: float
    load_after: float

    def cells(self) -> dict[str, str]:
        return {
            "form": self.form,
            "devices": self.devices,
            "work": self.work,
            "equal": f"{self.equal_ms:.2f}",
            "best": f"{self.best_ms:.2f}",
            "chosen": f"{self.chosen_ms:.2f}",
            "best split": self.best,
            "chosen split": self.chosen,
            "chosen/best": f"{self.over_best:.2f}",
            "95 % interval": f"{self.over_best_low:.2f} to {self.over_best_high:.2f}",
            "pairs": str(self.pairs),
            "at most": f"{self.bar:g}",
            "reached": self.verdict,
            "load": f"{self.load_before:.1f} to {self.load_after:.1f}",
        }


def summarise(
    form: str,
    devices: str,
    work: str,
    times: Sequence[Sequence[float]],
    best: Sequence[int],
    chosen: Sequence[int],
    loads: tuple[float, float],
) -> Row:
    """The row for the seconds of a call with the chosen split, with equal chunks and with the best fixed split."""
    ours, equal, fixed = times
    comparison = Comparison(list(fixed), list(ours), *loads)
    return Row(
        form=form,
        devices=devices,
        work=work,
        pairs=comparison.pairs,
        equal_ms=1e3 * statistics.median(equal),
        best_ms=1e3 * statistics.median(fixed),
        chosen_ms=1e3 * statistics.median(ours),
        best=" ".join(map(str, best)),
        chosen=" ".join(map(str, chosen)),
        over_best=comparison.ratio,
        over_best_low=comparison.low,
        over_best_high=comparison.high,
        bar=BAR,
        verdict=comparison.verdict(BAR, at_least=False),
        load_before=comparison.load_before,
        load_after=comparison.load_after,
    )
