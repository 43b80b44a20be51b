"""Replicating, inference and training steps beside ``torch.nn.parallel``, on the same module, batch and devices.

2, 4 and 8 devices, 2 samples for each. The ResNet-50 of width 4, and the GPT and the BERT of width 24, spend their time
in launches. The GPT of width 128 with 64 tokens spends it in its operators. The tests assert that both libraries do the
same work. The bars of the report say what its ratios should be; they fail no test.

Outputs and gradients have to be those of the chunks on one device, in float64, and in float32 after the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from beside_torch import IN_A_ROW, OURS, SETTLE, SHORT_SETTLE, TORCH, BesideTorch, ReadyReplicas, Timed
from pairs import CELLS, PAIRS, Call, milliseconds
from places import Places, device_name, simulator_notes
from plots import figure_for
from reporting import Report, Row
from shapes import NARROW_GPT, RESNET, SHAPES, WIDE_GPT, Shape

CAPTION = """\
ours and the other are median milliseconds of the two times that the quotient names. ratio is the median of the quotient
over the pairs, with its bootstrap 95 % interval. bar is what the ratio should be; reached says "not decided" where the
bar lies in the interval. Devices that are simulated, or those of a stand-in, compute on the CPU's cores. Their clocks
were off. On simulated devices plain copies stand in for torch's C++ functions; copies is their part of torch's time.

work:

replicate
    ``dataparallel.replicate`` beside ``torch.nn.parallel.replicate``, with gradients recorded. Replicas are dropped.
replicate, no_grad
    What the wrappers do first in ``forward`` under ``torch.no_grad()``: they make replicas.
replicate + end, no_grad
    The same, and the replicas are dropped, as at the end of the call.
replicate, frozen
    The same inside ``with model.options.frozen():``, where the library may rely on unchanged values and sends none.
inference, training step
    ``model(batch)`` in evaluation mode without gradients; ``forward``, a loss, ``backward`` and ``zero_grad``.
inference, frozen
    Inference inside ``with model.options.frozen():``.

quotient:

torch/ours
    How many times as fast as torch the library is.
(torch - copies)/ours
    On simulated devices: the same if torch's copies took no time, while the library's still do. What torch's own
    functions would give lies between the two.
ours/in a row, torch/in a row
    The time of the step over that of as many steps on one device, chunk after chunk. One device uses one core here,
    several use two.
torch/ready, threads: 1 or 2
    The time of torch over that of a wrapper that costs nothing, in the column "ours": copies of the module that are
    already on their devices, with their chunks, run by one thread or two. Nothing is sent, gathered or summed. No
    library that runs replicas in threads can be much faster on the same machine.
ours/ready
    The library's time over that of the ready replicas, with the number of threads that is faster."""

REPLICATE = "replicate"
REPLICATE_NO_GRAD = "replicate, no_grad"
REPLICATE_AND_END = "replicate + end, no_grad"
REPLICATE_FROZEN = "replicate, frozen"
INFERENCE = "inference"
INFERENCE_FROZEN = "inference, frozen"
TRAINING = "training step"
WORKS = (REPLICATE, REPLICATE_NO_GRAD, REPLICATE_AND_END, REPLICATE_FROZEN, INFERENCE, INFERENCE_FROZEN, TRAINING)

FASTER = "torch/ours"
FASTER_LESS_COPIES = "(torch - copies)/ours"
OVER_IN_A_ROW = "ours/in a row"
TORCH_OVER_IN_A_ROW = "torch/in a row"
TORCH_OVER_READY = "torch/ready, threads: {}"
OVER_READY = "ours/ready"
READY = "ready, {}"
THREADS = (1, 2)  # of ready replicas

BAR_DEVICES = 8
AT_MOST = {OVER_IN_A_ROW, TORCH_OVER_IN_A_ROW, OVER_READY}
NARROW = (RESNET.name, NARROW_GPT.name)
BARS: dict[tuple[str, str, str], float] = {
    **{(REPLICATE, FASTER, model): 2.5 for model in NARROW},
    **{(REPLICATE, FASTER_LESS_COPIES, model): 2.1 for model in NARROW},
    **{(REPLICATE_NO_GRAD, FASTER, model): 6 for model in NARROW},
    **{(REPLICATE_AND_END, FASTER, model): 6 for model in NARROW},
    **{(REPLICATE_FROZEN, FASTER, model): 20 for model in NARROW},
    **{(INFERENCE, FASTER, model): 2.2 for model in NARROW},
    **{(INFERENCE_FROZEN, OVER_READY, model): 1.1 for model in NARROW},
    (INFERENCE, FASTER, WIDE_GPT.name): 1.3,
    **{(TRAINING, FASTER, model): 1.6 for model in NARROW},
    (TRAINING, FASTER, WIDE_GPT.name): 1.2,
    **{(TRAINING, OVER_IN_A_ROW, model): 1.15 for model in (*NARROW, WIDE_GPT.name)},
}
TABLE = {
    "model": "{model}",
    "devices": "{devices}",
    "work": "{work}",
    "quotient": "{quotient}",
    "ours": "{ours_ms:.2f}",
    "the other": "{other_ms:.2f}",
    "copies": "{copies_ms:.2f}",
    **CELLS,
}

Measure = Callable[..., None]

pytestmark = [
    pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support"),
    pytest.mark.parametrize("count", [2, 4, 8]),
    pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name),
]


def rows_of(model: str, devices: Sequence[torch.device], work: str, timed: Timed) -> list[dict[str, Any]]:
    """A row for each quotient for which there are times."""
    ours, theirs, row = timed.seconds[OURS], timed.seconds[TORCH], timed.seconds.get(IN_A_ROW)
    copies = milliseconds(timed.copies) if timed.copies else None
    quotients = [(FASTER, timed.compared(ours, theirs), copies)]
    if work.startswith(REPLICATE) and timed.copies:
        less = [whole - part for whole, part in zip(theirs, timed.copies, strict=True)]
        quotients.append((FASTER_LESS_COPIES, timed.compared(ours, less), copies))
    if row is not None:
        quotients.append((OVER_IN_A_ROW, timed.compared(ours, row), None))
        quotients.append((TORCH_OVER_IN_A_ROW, timed.compared(theirs, row), None))
    ready = {number: found for number in THREADS if (found := timed.seconds.get(READY.format(number))) is not None}
    quotients += [(TORCH_OVER_READY.format(number), timed.compared(own, theirs), None) for number, own in ready.items()]
    if ready:
        quotients.append((OVER_READY, timed.compared(ours, min(ready.values(), key=milliseconds)), None))
    return [
        {
            "model": model,
            "device": device_name(devices[0]),
            "devices": len(devices),
            "work": work,
            "quotient": quotient,
            "pairs": found.pairs,
            "ours_ms": milliseconds(found.ours),
            "other_ms": milliseconds(found.theirs),
            "copies_ms": copied,
            **found.row(
                BARS.get((work, quotient, model)) if len(devices) == BAR_DEVICES else None, quotient in AT_MOST
            ),
        }
        for quotient, found, copied in quotients
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """For each model how many times as fast as torch it is, and its steps beside the same chunks in a row."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    models = list(dict.fromkeys(row["model"] for row in rows))
    counts = sorted({row["devices"] for row in rows})
    size = (3.6 * len(models), 6.4)
    with figure_for(path, size, 2, len(models), sharey="row") as figure:
        upper, lower = figure.axes[: len(models)], figure.axes[len(models) :]
        for column, model in enumerate(models):
            own = [row for row in rows if row["model"] == model]
            faster, steps = upper[column], lower[column]
            works = [work for work in WORKS if any(row["work"] == work for row in own)]
            by_work = [
                (work, [row for row in own if (row["work"], row["quotient"]) == (work, FASTER)]) for work in works
            ]
            _bars(faster, counts, by_work)
            by_quotient = [
                (quotient, [row for row in own if row["quotient"] == quotient])
                for quotient in (OVER_IN_A_ROW, TORCH_OVER_IN_A_ROW)
            ]
            _bars(steps, counts, by_quotient)
            faster.set_title(model)
            faster.set_yscale("log", base=2)
            faster.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        upper[0].set_ylabel("torch's time / ours")
        lower[0].set_ylabel("time of a step / single-device steps in a row")
        handles = [Patch(color=f"C{k}") for k in range(len(counts))]
        handles.append(Line2D([], [], color="red", linewidth=2))
        labels = [f"{count} devices ({rows[0]['device']})" for count in counts] + ["bar"]
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")


def _bars(axes: Any, counts: Sequence[int], groups: Sequence[tuple[str, Sequence[Row]]]) -> None:
    """A group of bars for each name, with one bar for each number of devices. In red is what the ratio should be."""
    width = 0.8 / len(counts)
    for k, count in enumerate(counts):
        placed = [(x, row) for x, (_, rows) in enumerate(groups) for row in rows if row["devices"] == count]
        places = [x + (k - (len(counts) - 1) / 2) * width for x, _ in placed]
        heights = [row["ratio"] for _, row in placed]
        whiskers = [
            [max(0.0, row["ratio"] - row["ratio_low"]) for _, row in placed],
            [max(0.0, row["ratio_high"] - row["ratio"]) for _, row in placed],
        ]
        axes.bar(places, heights, width, yerr=whiskers, capsize=2, color=f"C{k}", ecolor="0.2")
        for place, (_, row) in zip(places, placed, strict=True):
            if row["bar"] is not None:
                axes.hlines(row["bar"], place - width / 2, place + width / 2, color="red", linewidth=2)
    axes.axhline(1, color="grey", linestyle=":")
    axes.set_xticks(range(len(groups)), [name for name, _ in groups], rotation=25, ha="right", fontsize="small")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("beside_torch", CAPTION, TABLE, plot, notes=simulator_notes(places)))
    return reports[-1]


@pytest.fixture
def devices(shape: Shape, count: int, places: Places, short: bool, report: Report) -> list[torch.device]:
    if short and (shape, count) not in ((NARROW_GPT, 8), (RESNET, 2)):
        pytest.skip("short")
    return places.apart_or_skip(count, report)[:count]


@pytest.fixture
def beside(shape: Shape, devices: list[torch.device]) -> BesideTorch:
    return BesideTorch(shape, devices)


@pytest.fixture
def measure(shape: Shape, beside: BesideTorch, places: Places, report: Report, short: bool, once: Any) -> Measure:
    """A function that times calls in turn and reports them."""

    def run(work: str, ours: Call, theirs: Call, others: Mapping[str, Call] = {}, between: Call = lambda: None) -> None:
        pairs = 2 * PAIRS if len(beside.devices) == BAR_DEVICES else PAIRS
        with places.clocks_off():
            calls = {OURS: ours, TORCH: theirs, **others}
            timed = once(beside.time, calls, pairs, SHORT_SETTLE if short else SETTLE, short, between)
        report.rows += rows_of(shape.name, beside.devices, work, timed)

    return run


def test_same_results_in_float64(shape: Shape, devices: list[torch.device]) -> None:
    beside = BesideTorch(shape, devices, torch.float64)
    beside.check_training()
    with torch.no_grad():
        beside.module.eval()
        beside.check_inference()


def test_replicate(beside: BesideTorch, measure: Measure) -> None:
    measure(REPLICATE, beside.replicate, beside.torch_replicate)
    beside.check_replicas()


@torch.no_grad()
@pytest.mark.parametrize("work", [REPLICATE_NO_GRAD, REPLICATE_AND_END])
def test_replicate_without_gradients(work: str, beside: BesideTorch, measure: Measure) -> None:
    """By the wrappers, as in their ``forward``: without a graph. Also with what they do at the end of a call."""
    end = work == REPLICATE_AND_END
    ours, theirs = (partial(beside.wrapper_replicate, wrapper, end=end) for wrapper in (beside.ours, beside.theirs))
    measure(work, ours, theirs, between=(lambda: None) if end else beside.end)
    beside.check_replicas()


@torch.no_grad()
def test_replicate_frozen(beside: BesideTorch, measure: Measure) -> None:
    """By the wrappers, where the library may rely on unchanged values."""
    ours, theirs = (partial(beside.wrapper_replicate, wrapper) for wrapper in (beside.ours, beside.theirs))
    with beside.ours.options.frozen():
        measure(REPLICATE_FROZEN, ours, theirs, between=beside.end)
        beside.check_replicas()


def ready(beside: BesideTorch, work: str) -> dict[str, Call]:
    """The work by ready replicas, which is the least time that it can take. None where no bar is judged."""
    found = {}
    for threads in THREADS if len(beside.devices) == BAR_DEVICES else ():
        replicas = ReadyReplicas(beside.module, beside.batch, beside.devices, threads)
        replicas.check(beside.module, beside.batch)
        found[READY.format(threads)] = replicas.train if work == TRAINING else replicas.infer
    return found


@pytest.mark.parametrize("work", [INFERENCE, INFERENCE_FROZEN])
def test_inference(work: str, beside: BesideTorch, measure: Measure) -> None:
    beside.module.eval()
    others = ready(beside, INFERENCE)
    with torch.no_grad(), beside.ours.options.frozen() if work == INFERENCE_FROZEN else nullcontext():
        measure(work, beside.infer, beside.torch_infer, others)
        beside.check_inference()


def test_training_step(beside: BesideTorch, measure: Measure) -> None:
    """Without an optimizer, so that all steps are the same. Also beside the chunks in a row on one device."""
    others = {IN_A_ROW: beside.train_in_a_row, **ready(beside, TRAINING)}
    measure(TRAINING, beside.train, beside.torch_train, others)
    beside.check_training()
