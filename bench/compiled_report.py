"""From the times of compiled and eager replicas to the rows of a table, and from predictions to those of another.

Does not know how the times were taken, and measures nothing itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiled import COMPILED, COMPILED_IN_A_ROW, EAGER, IN_A_ROW, REPLICATED
from pairs import Comparison, Verdict

CAPTION = """\
A training step (forward, loss and backward) and inference by replicas that Inductor has compiled, which take turns with
each of the others. "in a row" are the same chunks, one after the other on one device without the library.

ms
    The median.
ms per replica
    The same divided by the number of replicas. On CPU slots all of it is the host's time, kernels included.
beyond its row
    The part of it that is not in the same chunks in a row, compiled where the replicas are: what the library takes of
    the host for each replica.
this/compiled
    The time of the row over that of compiled replicas: the median over the pairs, and its 95 % interval. Above 1,
    compiled replicas are faster.
at least
    The bar, and whether the ratio reaches it: "not decided" where the bar lies in the interval.
launches
    What is launched for a replica: kernels that Inductor has generated and operators that it calls, counted in its
    code for the CPU; or operators that a simulated device runs. A launch on an accelerator costs the host some
    microseconds."""

PREDICTED_CAPTION = """\
Predictions: nothing here was measured on such devices. A training step (forward, backward and SGD) by
composable.replicate with float32 on 8 x A100, as in the table of timelines. The launches of compiled graphs are those
that the backend aot_eager makes, merged afterwards: neighbours on one stream are one launch if they are neither copies
nor products of matrices, attention or convolutions, and nothing else waits between them. What Inductor would choose on
a GPU is unknown without one. A merged launch reads and writes as much as its parts, so that what fusion saves of memory
traffic is not in the prediction.

compiled, blocks compiled
    The model, or each of its blocks, is compiled. The code that Inductor generates by default is Python, in backward
    too: there each launch holds the interpreter lock, which eager operators in backward do not.
cpp_wrapper
    With options={"cpp_wrapper": True} the code is C++ that has released the lock.
launches
    In a step, on all devices, copies included.
step, ms
    What one more step takes, where the host may run ahead of the devices.
free host, ms
    One more step if launching cost nothing.
measured host, ms
    One more step if each launch costs the host what Python took for it on the machine that recorded, scaled by the
    factor that makes it fit the machine's host for the module alone and eager.
host, ms
    What launches cost the host in all threads together.
exposed
    The part of the step that it is longer than if copies took no time."""

IN_A_ROW_OF = {COMPILED: COMPILED_IN_A_ROW, REPLICATED: COMPILED_IN_A_ROW, EAGER: IN_A_ROW}
BARS: dict[tuple[bool, str], float] = {(True, EAGER): 1.5, (False, EAGER): 2.5}
"""By whether it is a training step, and by the way."""


@dataclass(frozen=True)
class Row:
    """One way to do one kind of work with one model. All but that of compiled replicas have a ratio to it."""

    model: str
    work: str
    way: str
    replicas: int
    milliseconds: float
    beyond_in_a_row: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    bar: float | None
    verdict: Verdict | None
    pairs: int
    launches: int | None
    load_before: float
    load_after: float

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f} [{self.ratio_low:.2f}, {self.ratio_high:.2f}]"
        return {
            "model": self.model,
            "work": self.work,
            "way": self.way,
            "ms": f"{self.milliseconds:.1f}",
            "ms per\nreplica": f"{self.milliseconds / self.replicas:.2f}",
            "beyond\nits row": "" if self.beyond_in_a_row is None else f"{self.beyond_in_a_row / self.replicas:.2f}",
            "this/compiled": ratio,
            "at least": "" if self.bar is None else f"{self.bar:g}: {self.verdict}",
            "launches": "" if self.launches is None else str(self.launches),
            "load": f"{self.load_before:.1f} to {self.load_after:.1f}",
        }


def summarise(
    model: str,
    training: bool,
    replicas: int,
    seconds: Mapping[str, Sequence[float]],
    launches: Mapping[bool, int | None],
    load: tuple[float, float],
) -> list[Row]:
    """A row for each way. ``launches`` are those of a replica, by whether it is compiled."""
    rows = []
    for way, own in seconds.items():
        is_compiled = way in (COMPILED, REPLICATED, COMPILED_IN_A_ROW)
        compared = None if way == COMPILED else Comparison([*seconds[COMPILED]], [*own], *load)
        bar = BARS.get((training, way))
        rows.append(
            Row(
                model=model,
                work="training step" if training else "inference",
                way=way,
                replicas=replicas,
                milliseconds=1e3 * statistics.median(own),
                beyond_in_a_row=beyond(way, seconds),
                ratio=None if compared is None else compared.ratio,
                ratio_low=None if compared is None else compared.low,
                ratio_high=None if compared is None else compared.high,
                bar=bar,
                verdict=None if bar is None or compared is None else compared.verdict(bar),
                pairs=len(own),
                launches=launches[is_compiled],
                load_before=load[0],
                load_after=load[1],
            )
        )
    return rows


def beyond(way: str, seconds: Mapping[str, Sequence[float]]) -> float | None:
    """Milliseconds that replicas take longer than the chunks in a row: the median over the rounds."""
    row = IN_A_ROW_OF.get(way)
    if row is None:
        return None
    return 1e3 * statistics.median(own - other for own, other in zip(seconds[way], seconds[row], strict=True))


@dataclass(frozen=True)
class PredictedRow:
    """One way on 8 x A100."""

    model: str
    way: str
    devices: int
    launches: int
    step: float
    measured_host: float
    free_host: float
    host: float
    exposed: float

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "model": self.model,
            "way": self.way,
            "devices": str(self.devices),
            "launches": f"{self.launches:,}",
            "step, ms": f"{self.step:.1f}",
            "free host, ms": f"{self.free_host:.1f}",
            "measured host, ms": f"{self.measured_host:.1f}",
            "host, ms": f"{self.host:.1f}",
            "exposed": f"{100 * max(self.exposed, 0.0) / self.step:.1f} %",
        }
