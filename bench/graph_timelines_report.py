"""From predictions for captured graphs to the rows of a table, and to what misses its bars.

Does not know how predictions are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INFERENCE, TRAINING = "inference", "training"
ALL_REDUCED = "DDP, 8 processes"
MOST_OF_FREE_HOST = 1.15
MOST_CALLS = 60

CAPTION = f"""\
Predictions: nothing here was measured on such devices. Steps were recorded on a stand-in for CUDA that skips kernels,
and scheduled on 8 x A100. Training is forward, the loss on the first device, backward and a step of SGD, in float32
with TF32; inference is a call without gradients. Each device gets what the name of the model says.

way
    composable.fully_shard has a unit for each block, and one for the rest. With 4 large units the blocks are in four:
    the stages of the ResNet, or a quarter of the blocks each.
graphs
    With graphs=True. The module alone and DDP have their whole step in one graph, which is the best that can be done.
step, free host, ms
    What one more step takes, where the host may run ahead of the devices; and the same if the host's calls cost
    nothing. A launch costs the host 5 to 7 us, and that of a graph 10 to 13 us, however many kernels it has. A kernel
    takes the device 3 us besides its work, also in a graph.
Python, ms
    CPU time of Python's threads between the calls of a step, as measured where it was recorded, and scaled by the
    factor that makes it fit the host above for the module alone. It is not in the other columns: in one process these
    threads share a lock, so a step can hardly take less.
step/free host
    With graphs at most {MOST_OF_FREE_HOST:g} is wanted.
calls
    How often the host launches a kernel, a copy or a graph in a step, for each device; with graphs at most {MOST_CALLS}
    are wanted. "graphs" is how many of these launch a graph.

DDP is made of the recording of the module alone: a process and a host for each device, and for each bucket of 25 MiB
an all-reduce as soon as its gradients are there. It takes the latency of a copy and the time of 2 (N - 1) / N of its
bytes over one link, and the gradients lie in the buckets. Buffers are not sent, and no process waits for a slower
one: this is the best that DDP can do. torch.nn.DataParallel is torch's pipeline with plain copies, which it has
without NCCL."""


@dataclass(frozen=True)
class PredictedStep:
    """One way to do one kind of work with one model. Times are milliseconds; calls are those for each device."""

    model: str
    work: str
    way: str
    graphs: bool
    devices: int
    machine: str
    step: float
    free_host: float
    python: float
    launches: int
    calls: float
    graph_calls: float

    @property
    def of_free_host(self) -> float:
        """How many times as long a step takes because the host's calls cost something."""
        return self.step / self.free_host

    @property
    def misses(self) -> list[str]:
        """The bars that a way of the library misses. Only ways with graphs have bars."""
        if not self.graphs or self.devices == 1 or self.way == ALL_REDUCED:
            return []
        found = []
        if self.of_free_host > MOST_OF_FREE_HOST:
            found.append(f"{self.of_free_host:.2f} times a free host")
        if self.calls > MOST_CALLS:
            found.append(f"{self.calls:.0f} calls")
        return found

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "model": self.model,
            "work": self.work,
            "way": self.way,
            "graphs": "yes" if self.graphs else "no",
            "devices": str(self.devices),
            "step,\nms": f"{self.step:.2f}",
            "free host,\nms": f"{self.free_host:.2f}",
            "step/\nfree host": f"{self.of_free_host:.2f}",
            "Python,\nms": f"{self.python:.2f}",
            "calls": f"{self.calls:.0f}",
            "graphs\n": f"{self.graph_calls:.0f}",
            "misses": "; ".join(self.misses),
        }


def judged(rows: Sequence[PredictedStep]) -> list[str]:
    """A sentence that says which bars are missed."""
    barred = [row for row in rows if row.graphs and row.devices > 1 and row.way != ALL_REDUCED]
    missed = [f"{row.way}, {row.model}, {row.work}: {', '.join(row.misses)}" for row in barred if row.misses]
    if not barred:
        return []
    reached = f"{len(barred) - len(missed)} of {len(barred)} rows with graphs reach both bars."
    return [reached + (f" The others: {'; '.join(missed)}." if missed else "")]
