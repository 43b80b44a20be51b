"""From the times of the library's forms and of torch's wrappers to the rows of a table.

Does not know how the times were taken, and measures nothing itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pairs import Comparison, Verdict
from shapes import NARROW_GPT, RESNET, WIDE_GPT

CAPTION = """\
A training step (forward, loss and backward) by the library's forms and by others. ours and the other are median
milliseconds, or mebibytes, of the two that the quotient names. ours is replicate, and in the row of
nn.DataParallel/fully_shard it is fully_shard. ratio is the median of the quotient over the rounds, with its bootstrap
95 % interval. For memory it is that of proportional set sizes, measured once. bar is what the ratio should be; reached
says "not decided" where the bar lies in the interval. "in a row" are the same chunks one after the other on one device.
fully_shard has a unit for each block and one for the rest; with reshard_after_forward=False it keeps gathered weights
until backward, which is data parallelism with a sharded optimizer. What replicate saves is the making of replicas: on
CPU cores, where operators take most of the time, that is a smaller part than beside fast devices. Devices that are
simulated, or those of a stand-in, compute on the CPU's cores. Their clocks were off."""

BESIDE_TORCH = "nn.DataParallel/replicate"
BESIDE_WRAPPER = "DataParallel/replicate"
OVER_IN_A_ROW = "replicate/in a row"
BESIDE_SHARDED = "fully_shard/replicate"
BESIDE_NOT_RESHARDED = "fully_shard, reshard_after_forward=False/replicate"
SHARDED_BESIDE_TORCH = "nn.DataParallel/fully_shard"
BESIDE_DDP = "DDP/replicate"
MEMORY_OVER_DDP = "memory replicate/DDP"

AT_MOST = {OVER_IN_A_ROW, MEMORY_OVER_DDP}
BAR_DEVICES = 8
BARS: dict[tuple[str, str], float] = {
    (BESIDE_TORCH, RESNET.name): 1.5,
    (BESIDE_TORCH, NARROW_GPT.name): 1.5,
    (BESIDE_TORCH, WIDE_GPT.name): 1.3,
    **{(BESIDE_WRAPPER, shape.name): 1.0 for shape in (RESNET, NARROW_GPT, WIDE_GPT)},
    **{(OVER_IN_A_ROW, shape.name): 1.0 for shape in (RESNET, NARROW_GPT)},
}
DDP_BAR = 1.0
MEMORY_BAR = 0.7


@dataclass(frozen=True)
class Row:
    """One quotient of one model on a number of slots, of milliseconds or of mebibytes."""

    model: str
    slots: str
    quotient: str
    ours: float
    other: float
    ratio: float
    ratio_low: float
    ratio_high: float
    pairs: int
    bar: float | None
    at_most: bool
    verdict: Verdict | None
    load_before: float
    load_after: float

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        interval = f"{self.ratio_low:.2f} to {self.ratio_high:.2f}" if self.pairs > 1 else ""
        return {
            "model": self.model,
            "slots": self.slots,
            "quotient": self.quotient,
            "ours": f"{self.ours:.1f}",
            "the other": f"{self.other:.1f}",
            "ratio": f"{self.ratio:.2f}",
            "95 % interval": interval,
            "pairs": str(self.pairs),
            "bar": "" if self.bar is None else f"{'at most' if self.at_most else 'at least'} {self.bar:g}",
            "reached": self.verdict or "",
            "load": f"{self.load_before:.1f} to {self.load_after:.1f}",
        }


def timed(model: str, slots: str, quotient: str, comparison: Comparison, bar: float | None) -> Row:
    """A row of times, those of the library's form first."""
    at_most = quotient in AT_MOST
    judged = comparison.swapped if at_most else comparison
    return Row(
        model=model,
        slots=slots,
        quotient=quotient,
        ours=1e3 * statistics.median(comparison.ours),
        other=1e3 * statistics.median(comparison.theirs),
        ratio=judged.ratio,
        ratio_low=judged.low,
        ratio_high=judged.high,
        pairs=judged.pairs,
        bar=bar,
        at_most=at_most,
        verdict=None if bar is None else judged.verdict(bar, not at_most),
        load_before=comparison.load_before,
        load_after=comparison.load_after,
    )


def held(model: str, slots: str, replicate: int, other: int, load: Sequence[float]) -> Row:
    """A row of memory, from bytes."""
    ratio = replicate / other
    verdict: Verdict = "yes" if ratio <= MEMORY_BAR else "no"
    sizes = replicate / 2**20, other / 2**20
    return Row(model, slots, MEMORY_OVER_DDP, *sizes, ratio, ratio, ratio, 1, MEMORY_BAR, True, verdict, *load)
