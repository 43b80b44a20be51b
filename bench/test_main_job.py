"""The main job: train on handwritten digits, and show what this library costs beside one device and beside torch.

It takes about two minutes on two cores. It runs on up to 4 of the machine's accelerators where there are several,
otherwise on 4 simulated devices, and without these on 4 CPU slots, where ``torch.nn.DataParallel`` cannot run. A
second table has the memory that a training takes. Results are asserted, times never.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharded_memory
from dataparallel import DataParallel
from dataparallel.composable import replicate
from digits import BATCH_SIZE, TrainingRun, Way, largest_difference, load, network
from forms import Forms
from gradients import assert_same_gradients, gradients_of
from nogpu.cuda import is_stand_in
from pairs import PAIRS, SHORT_PAIRS, Call, Comparison, milliseconds, take_turns
from places import Places, device_name, is_simulated, slots_on
from plots import figure_for
from reporting import Report, Row
from shapes import NARROW_GPT, RESNET, InARow, Shape
from torch_pipeline import StandIns

SLOTS = 4
EPOCHS, SHORT_EPOCHS = 12, 6
EPOCHS_IN_FLOAT64, SHORT_EPOCHS_IN_FLOAT64 = 4, 1
SETTLE, SHORT_SETTLE = 16, 1  # calls in which the library chooses how many replicas run at a time

ONE_DEVICE = "one device"
TORCH = "torch.nn.DataParallel"
WRAPPER = "DataParallel"
REPLICATE = "composable.replicate"
SHARDED = "composable.fully_shard"
TRAINING: dict[str, Way] = {
    ONE_DEVICE: lambda module, devices: InARow(module, len(devices)),
    TORCH: lambda module, devices: nn.DataParallel(module, device_ids=[device.index for device in devices]),
    WRAPPER: DataParallel,
    REPLICATE: lambda module, devices: replicate(module, devices=devices),
}
COLUMNS = {ONE_DEVICE: "one_device_ms", TORCH: "torch_ms", WRAPPER: "data_parallel_ms", REPLICATE: "replicate_ms"}

CAPTION = """\
How long the same work takes by each way to do it, in milliseconds: less is better. Each number is a median. All ways of
a row take turns, so that whatever else the machine does slows all of them down.

model
    *digits* is a small residual network that learns to read handwritten digits; its row is an epoch of that training,
    optimizer included. The other two have all the layers of the models they are named after, but narrow ones, so that
    little is left but the overhead. A training step is forward, loss and backward. *copy to devices* makes one replica
    of the model for each device, with gradients recorded.
one device
    No wrapper: the parts of the batch one after the other on one device.
torch.nn.DataParallel
    PyTorch's own wrapper, and torch.nn.parallel.replicate for *copy to devices*.
DataParallel, composable.replicate
    This library's wrapper, and its form without a wrapper, whose replicas stay from step to step.
times as fast as torch
    The time of torch.nn.DataParallel divided by that of this library's DataParallel, turn by turn: the median, and in
    brackets where it lies with a confidence of 95 %."""

MEMORY_CAPTION = """\
How much memory of each device a training with AdamW takes, in MiB, on the device that has most: less is better. The
simulator counts every byte. The model is a GPT of 8 blocks, 256 wide, and each device has 2 samples of 64 tokens.

between steps
    Parameters and the state of AdamW.
at most
    The peak during a step: gradients and activations come on top.

composable.fully_shard spreads parameters, gradients and the state of AdamW over the devices, and gathers each block
when it is needed."""

ON_SIMULATED = "The {} devices are simulated."
ON_STAND_IN = (
    "The {} devices are those of a stand-in: this is torch's CUDA build, and its own functions copy between devices, "
    "but a stand-in answers CUDA's and NCCL's functions."
)
ON_THE_CPU = (
    "They compute on the CPU cores of this machine, so no way can be faster than *one device* by more than the number "
    "of cores. The table shows the overhead of each way, not the speed-up on GPUs."
)
STAND_INS = (
    "torch's own copies between devices need CUDA. Plain copies stand in for them, which are {:.0%} to {:.0%} of the "
    "times of torch below."
)


def rounded(milliseconds: float | None) -> str:
    """Three digits, or more before the point."""
    if milliseconds is None:
        return ""
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


TABLE = {
    "model": "{model}",
    "work": "{work}",
    "one\ndevice": lambda row: rounded(row["one_device_ms"]),
    "torch.nn.\nDataParallel": lambda row: rounded(row["torch_ms"]),
    "DataParallel": lambda row: rounded(row["data_parallel_ms"]),
    "composable.\nreplicate": lambda row: rounded(row["replicate_ms"]),
    "times as fast\nas torch": "{times_as_fast:.2f} ({times_as_fast_low:.2f} to {times_as_fast_high:.2f})",
}
MEMORY_TABLE = {"way": "{way}", "devices": "{devices}", "between steps": "{idle:.1fMiB}", "at most": "{peak:.1fMiB}"}

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support")


def where(rows: Sequence[Row], devices: Sequence[torch.device]) -> list[str]:
    """What has to be known about the devices to read the table."""
    distinct, name = len(set(devices)), device_name(devices[0])
    if distinct == 1:
        return [
            f"Measured on {len(devices)} slots on one device, {name}. torch.nn.DataParallel takes no CPU and each "
            "accelerator only once, so its column is empty."
        ]
    if is_stand_in():
        return [f"{ON_STAND_IN.format(distinct)} {ON_THE_CPU}"]
    if not is_simulated(devices[0]):
        return [f"Measured on {distinct} devices, {name}."]
    notes = [f"{ON_SIMULATED.format(distinct)} {ON_THE_CPU}"]
    shares = [row["torch_copies_ms"] / row["torch_ms"] for row in rows if row["torch_copies_ms"]]
    return [*notes, STAND_INS.format(min(shares), max(shares))] if shares else notes


def plot(rows: Sequence[Row], path: Path) -> None:
    """A panel for each row of the table, a bar for each way."""
    columns = 4
    lines = -(-len(rows) // columns)
    with figure_for(path, (2.6 * columns, 1.6 * lines + 0.9), lines, columns) as figure:
        for axes in figure.axes[len(rows) :]:
            axes.set_axis_off()
        for axes, row in zip(figure.axes, rows, strict=False):
            by_way = {way: row[column] for way, column in COLUMNS.items() if row[column] is not None}
            for place, (way, found) in enumerate(by_way.items()):
                bar = axes.barh(place, found, color=color(way))
                axes.bar_label(bar, [rounded(found)], padding=3, fontsize="small")
            axes.set_yticks([])
            axes.set_ylim(len(COLUMNS) - 0.5, -0.5)  # bars of one height in all panels, the first on top
            axes.set_xlim(0, 1.3 * max(by_way.values()))
            axes.set_title(f"{row['model']}\n{row['work']}", fontsize="medium")
            axes.locator_params(axis="x", nbins=4)
        shown = [way for way, column in COLUMNS.items() if any(row[column] is not None for row in rows)]
        bars = [figure.axes[0].barh(0, 0, color=color(way)) for way in shown]
        figure.legend(bars, shown, loc="outside lower center", ncols=len(shown), fontsize="medium")
        figure.suptitle("milliseconds (less is better)", fontsize="medium")


def color(way: str) -> str:
    return f"C{[*COLUMNS].index(way)}"


@pytest.fixture(scope="module")
def report(reports: list[Report], devices: list[torch.device]) -> Iterator[Report]:
    report = Report("main_job", CAPTION, TABLE, plot)
    reports.append(report)
    yield report
    report.notes[:0] = where(report.rows, devices)


@pytest.fixture(scope="module")
def devices(places: Places) -> list[torch.device]:
    """Up to 4 devices with memory of their own; where there are not two of them, 4 slots on the one that there is."""
    return places.apart[:SLOTS] if len(places.apart) > 1 else slots_on(places.real, SLOTS)


@pytest.fixture(scope="module")
def ways(places: Places, devices: list[torch.device]) -> dict[str, Way]:
    """The ways to train on these devices: torch's wrapper takes distinct ones, and no CPU."""
    able = len(places.apart) > 1
    return {name: way for name, way in TRAINING.items() if able or name != TORCH}


def test_training_on_digits(
    ways: dict[str, Way], devices: list[torch.device], places: Places, report: Report, short: bool, once: Any
) -> None:
    """The same training by each way, an epoch in turn. Each has to read the digits."""
    epochs = SHORT_EPOCHS if short else EPOCHS
    stand_ins = StandIns(devices[0].type)
    with places.clocks_off(), stand_ins.installed():
        runs = {name: TrainingRun(devices, torch.float32, epochs, way) for name, way in ways.items()}
        calls = {name: run.train_epoch for name, run in runs.items()}
        report.rows.append(once(in_turns, "digits", "epoch", calls, stand_ins, epochs, warm_up=0))
        accuracies = {name: run.accuracy() for name, run in runs.items()}
    found = ", ".join(f"{accuracy:.1%} by {name}" for name, accuracy in accuracies.items())
    report.notes.append(f"Digits of the test set read correctly after {epochs} epochs: {found}.")
    # A shortened training is not through: it has to show that it learns (chance is 10 %).
    assert min(accuracies.values()) >= (0.80 if short else 0.96), found


def in_turns(model: str, work: str, calls: Mapping[str, Call], stand_ins: StandIns, rounds: int, warm_up: int) -> Row:
    """The row of ``calls``, which take turns: medians, `None` where a way cannot do it."""
    copies: list[float] = []
    if TORCH in calls:
        counted, copies = stand_ins.count(calls[TORCH])
        calls = {**calls, TORCH: counted}
    seconds = dict(zip(calls, take_turns(list(calls.values()), rounds, warm_up), strict=True))
    faster = Comparison(seconds[WRAPPER], seconds[TORCH]) if TORCH in seconds else None
    medians = {column: milliseconds(seconds[way]) if way in seconds else None for way, column in COLUMNS.items()}
    return {
        "model": model,
        "work": work,
        "turns": rounds,
        **medians,
        "torch_copies_ms": milliseconds(copies[-rounds:]) if copies and stand_ins.needed else None,
        "times_as_fast": None if faster is None else faster.ratio,
        "times_as_fast_low": None if faster is None else faster.low,
        "times_as_fast_high": None if faster is None else faster.high,
    }


@pytest.fixture(scope="module")
def one_slot(places: Places, short: bool) -> TrainingRun:
    """The training in float64 that others are compared with."""
    epochs = SHORT_EPOCHS_IN_FLOAT64 if short else EPOCHS_IN_FLOAT64
    return TrainingRun(places.real[:1], torch.float64, epochs).train()


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_loss_curve_in_float64_is_that_of_one_slot(
    kind: str, one_slot: TrainingRun, report: Report, places: Places
) -> None:
    """On simulated devices the clocks check every access to memory as well."""
    devices = places.real if kind == "real" else places.simulated
    if not devices:
        pytest.skip(places.why_not_simulated)
    several_slots = f"{SLOTS} {'slots' if kind == 'real' else 'simulated devices'}"
    several = TrainingRun(slots_on(devices, SLOTS), torch.float64, one_slot.epochs).train()
    difference = largest_difference(one_slot, several)
    report.notes.append(
        f"Loss curves in float64, {len(several.losses)} steps: those of one slot and of {several_slots} "
        f"differ by at most {difference:.1e}."
    )
    assert difference <= 1e-9


def test_gradients_in_float64_are_those_of_one_device(
    ways: dict[str, Way], devices: list[torch.device], report: Report
) -> None:
    """Of the network by each way, torch's included, and of the network itself with the whole batch."""
    data = load().to(devices[0], torch.float64)
    images, labels = data.train_images[:BATCH_SIZE], data.train_labels[:BATCH_SIZE]

    def gradients(way: Way) -> list[torch.Tensor]:
        module = network().to(devices[0], torch.float64)
        F.cross_entropy(way(module, devices)(images), labels).backward()
        return gradients_of(module)

    expected = gradients(lambda module, _: module)
    for way in ways.values():
        with StandIns(devices[0].type).installed():
            assert_same_gradients(gradients(way), expected)
    report.notes.append("Gradients in float64 are those of one device with the whole batch, by each way.")


@pytest.mark.parametrize("shape", [RESNET, NARROW_GPT], ids=lambda shape: shape.name)
def test_beside_torch(shape: Shape, devices: list[torch.device], places: Places, report: Report, short: bool) -> None:
    """Replicas, inference and training steps. Before and after, all ways have the same results."""
    places.apart_or_skip(2, report)
    forms = Forms(shape, devices)
    copying = {TORCH: forms.torch_replicate, WRAPPER: forms.replicate}
    training = {
        ONE_DEVICE: forms.train_in_a_row,
        TORCH: forms.torch_train,
        WRAPPER: forms.train,
        REPLICATE: forms.train_replicated,
    }
    inference = {
        ONE_DEVICE: forms.infer_in_a_row,
        TORCH: forms.torch_infer,
        WRAPPER: forms.infer,
        REPLICATE: forms.infer_replicated,
    }
    rounds, warm_up, settle = (SHORT_PAIRS, 1, SHORT_SETTLE) if short else (PAIRS, 2, SETTLE)

    def measure(work: str, calls: dict[str, Call]) -> None:
        for _ in range(settle):
            for name in {WRAPPER, REPLICATE} & calls.keys():
                calls[name]()
        report.rows.append(in_turns(shape.name, work, calls, forms.stand_ins, rounds, warm_up))

    check(forms)
    with places.clocks_off(), forms.stand_ins.installed():
        measure("copy to devices", copying)
        measure("training step", training)
        forms.module.eval()
        forms.replicated.eval()
        with torch.no_grad():
            measure("inference", inference)
    check(forms)


def check(forms: Forms) -> None:
    """Raises `AssertionError` unless replicas, outputs and gradients are those of one device, by each way."""
    forms.check_replicas()
    for training in (False, True):
        forms.module.train(training)
        forms.replicated.train(training)
        with torch.set_grad_enabled(training):
            if training:
                forms.check_training()
                forms.check_replicated()
            else:
                forms.check_inference()


def test_memory_of_a_sharded_model(reports: list[Report], places: Places) -> None:
    """Beside replicas and one device."""
    if len(places.simulated) < SLOTS:
        pytest.skip(f"only simulated devices count bytes: {places.why_not_simulated}")
    ways = {ONE_DEVICE: ("one device", 1), REPLICATE: ("replicate", SLOTS), SHARDED: ("fully_shard", SLOTS)}
    report = Report("main_job_memory", MEMORY_CAPTION, MEMORY_TABLE)
    for name, (way, count) in ways.items():
        found = sharded_memory.NAMED[way]
        usage = sharded_memory.measure(sharded_memory.WIDE_GPT, found, places.simulated[:count], steps=1)
        report.rows.append({"way": name, "devices": count, "idle": usage.idle, "peak": usage.peak})
    reports.append(report)
    alone, _, sharded = report.rows
    assert sharded["idle"] < alone["idle"] / (SLOTS - 1)
