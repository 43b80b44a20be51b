"""The main job: train on handwritten digits, and show what this library costs beside one device and beside torch.

It takes about two minutes on two cores. It runs on up to 4 of the machine's accelerators where there are several,
otherwise on 4 simulated devices, and without these on 4 CPU slots, where ``torch.nn.DataParallel`` cannot run. A
second table has the memory that a training takes. Results are asserted, times never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

import sharded_memory
from digits import BATCH_SIZE, ResidualNet, TrainingRun, largest_difference, load, train
from forms import Forms
from gradients import assert_same_gradients, gradients_of
from main_job_report import (
    CAPTION,
    MEMORY_CAPTION,
    ONE_DEVICE,
    REPLICATE,
    SHARDED,
    TORCH,
    WRAPPER,
    MemoryRow,
    Turns,
    plot,
    summarise,
    where,
)
from pairs import PAIRS, SHORT_PAIRS, Call, take_turns
from places import Places, slots_on
from progress import Progress
from reporting import Report
from shapes import NARROW_GPT, RESNET, Shape
from torch_pipeline import StandIns
from ways import Way, by_hand, data_parallel, replicated, torch_data_parallel

SLOTS = 4
EPOCHS, SHORT_EPOCHS = 12, 6
EPOCHS_IN_FLOAT64, SHORT_EPOCHS_IN_FLOAT64 = 4, 1
SETTLE, SHORT_SETTLE = 20, 1  # calls in which the library chooses how many replicas run at a time
WARM_UP = 2

TRAINING = {ONE_DEVICE: by_hand, TORCH: torch_data_parallel, WRAPPER: data_parallel, REPLICATE: replicated}

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support")


@pytest.fixture(scope="module")
def report(reports: list[Report], devices: list[torch.device]) -> Iterator[Report]:
    report = Report("main_job", CAPTION, plot)
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
    ways: dict[str, Way], devices: list[torch.device], places: Places, report: Report, progress: Progress, short: bool
) -> None:
    """The same training by each way, an epoch in turn. Each has to read the digits."""
    epochs = SHORT_EPOCHS if short else EPOCHS
    stand_ins = StandIns(devices[0].type)
    with places.clocks_off(), stand_ins.installed():
        runs = {name: TrainingRun(devices, epochs=epochs, way=way) for name, way in ways.items()}
        calls: dict[str, Call] = {name: run.train_epoch for name, run in runs.items()}
        with progress("training on digits", epochs * len(runs)) as bar:
            report.rows.append(summarise(in_turns("digits", "epoch", calls, stand_ins, epochs, 0, bar.update)))
        accuracies = {name: run.accuracy() for name, run in runs.items()}
    found = ", ".join(f"{accuracy:.1%} by {name}" for name, accuracy in accuracies.items())
    report.notes.append(f"Digits of the test set read correctly after {epochs} epochs: {found}.")
    # A shortened training is not through: it has to show that it learns (chance is 10 %).
    assert min(accuracies.values()) >= (0.80 if short else 0.96), found


def in_turns(
    model: str, work: str, calls: dict[str, Call], stand_ins: StandIns, rounds: int, warm_up: int, tick: Call
) -> Turns:
    """The seconds of ``calls``, which take turns; ``tick`` is called before each."""
    copies: list[float] = []
    if TORCH in calls:
        counted, copies = stand_ins.count(calls[TORCH])
        calls = calls | {TORCH: counted}
    seconds = take_turns(list(calls.values()), rounds, warm_up, tick)
    return Turns(model, work, dict(zip(calls, seconds, strict=True)), copies[-rounds:])


@pytest.fixture(scope="module")
def one_slot(places: Places, short: bool) -> TrainingRun:
    """The training in float64 that others are compared with."""
    return train(places.real[:1], torch.float64, SHORT_EPOCHS_IN_FLOAT64 if short else EPOCHS_IN_FLOAT64)


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_loss_curve_in_float64_is_that_of_one_slot(
    kind: str, one_slot: TrainingRun, report: Report, places: Places, progress: Progress
) -> None:
    """On simulated devices the clocks check every access to memory as well."""
    devices = places.real if kind == "real" else places.simulated
    if not devices:
        pytest.skip(places.why_not_simulated)
    several_slots = f"{SLOTS} {'slots' if kind == 'real' else 'simulated devices'}"
    epochs = len(one_slot.epoch_seconds)
    with progress(f"float64 on {several_slots}", epochs) as bar:
        several = train(slots_on(devices, SLOTS), torch.float64, epochs, bar.update)
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

    def gradients(way: Callable[[torch.nn.Module], torch.nn.Module]) -> list[torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = ResidualNet()
        model = way(network.to(devices[0], torch.float64))
        F.cross_entropy(model(images), labels).backward()
        return gradients_of(network)

    expected = gradients(lambda network: network)
    for way in ways.values():
        with StandIns(devices[0].type).installed():
            assert_same_gradients(gradients(lambda network, way=way: way(network, devices)), expected)
    report.notes.append("Gradients in float64 are those of one device with the whole batch, by each way.")


@pytest.mark.parametrize("shape", [RESNET, NARROW_GPT], ids=lambda shape: shape.name)
def test_beside_torch(
    shape: Shape, devices: list[torch.device], places: Places, report: Report, progress: Progress, short: bool
) -> None:
    """Replicas, inference and training steps. Before and after, all ways have the same results."""
    places.apart_or_skip(2, report)
    forms = Forms(shape, devices)
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
    copying = {TORCH: forms.torch_replicate, WRAPPER: forms.replicate}
    rounds, warm_up = (SHORT_PAIRS, 1) if short else (PAIRS, WARM_UP)
    turns = (rounds + warm_up) * (len(training) + len(inference) + len(copying))

    def measure(work: str, calls: dict[str, Call]) -> None:
        for _ in range(SHORT_SETTLE if short else SETTLE):
            for name in {WRAPPER, REPLICATE} & calls.keys():
                calls[name]()
        found = in_turns(shape.name, work, calls, forms.stand_ins, rounds, warm_up, bar.update)
        report.rows.append(summarise(found))

    check(forms)
    with progress(shape.name, turns) as bar, places.clocks_off(), forms.stand_ins.installed():
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
    """Beside replicas and one device. Losses are those of one device."""
    if len(places.simulated) < SLOTS:
        pytest.skip(f"only simulated devices count bytes: {places.why_not_simulated}")
    ways = {
        ONE_DEVICE: (sharded_memory.ONE_DEVICE, 1),
        REPLICATE: (sharded_memory.REPLICATE, SLOTS),
        SHARDED: (sharded_memory.DEFAULT, SLOTS),
    }
    rows = []
    for name, (way, count) in ways.items():
        usage = sharded_memory.measure(sharded_memory.WIDE_GPT, way, places.simulated[:count], steps=1)
        rows.append(MemoryRow(name, count, usage.idle, usage.peak))
    reports.append(Report("main_job_memory", MEMORY_CAPTION, rows=rows))
    alone, _, sharded = rows
    assert sharded.idle < alone.idle / (SLOTS - 1)
