"""The main job, measured and judged: throughput on several slots, accuracy, equality with one slot.

On the machine's accelerators where it has any, else on CPU slots.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from tqdm import tqdm

from dataparallel.devices import all_devices
from digits import EPOCHS, TrainingRun, train
from throughput_report import Report, compare

SHORT_EPOCHS = 6


def slots(count: int) -> list[torch.device]:
    """`count` slots, dealt out in turn to the accelerators, or to the CPU where there are none."""
    devices = all_devices() or [torch.device("cpu")]
    return [devices[i % len(devices)] for i in range(count)]


def placements(most: int) -> list[list[torch.device]]:
    """1, 2, 4 ... `most` slots on the first device, then one on each of 2, 4 ... all devices."""
    devices = all_devices() or [torch.device("cpu")]
    counts = [2**i for i in range(most.bit_length())]
    shared = [devices[:1] * n for n in counts]
    several = range(2, len(devices) + 1)
    distinct = [devices[:n] for n in several if n in counts or n == len(devices)]
    return shared + distinct


def test_training_throughput(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], report: Report, short: bool
) -> None:
    """One round trains one epoch with every number of slots, one after the other.

    So all of them meet the same noise, and the report compares epochs of the same round. The whole
    batch is the same for every number of slots: they all do the same training.
    """
    epochs = SHORT_EPOCHS if short else EPOCHS
    runs = [TrainingRun(where, epochs=epochs) for where in placements(4 if short else 8)]
    # Where slots share a device, the same chunks can be called without the library.
    by_hand = {
        len(run.slots): TrainingRun(run.slots, epochs=epochs, by_hand=True) for run in runs if len({*run.slots}) == 1
    }

    def train_one_epoch_each() -> None:
        for run in runs:
            run.train_epoch()
            if len({*run.slots}) == 1:
                by_hand[len(run.slots)].train_epoch()
        bar.update()

    with capsys.disabled(), tqdm(total=epochs, desc="throughput", unit="round", disable=None) as bar:
        benchmark.pedantic(train_one_epoch_each, rounds=epochs)
    if benchmark.enabled:
        report.rows += compare(runs, by_hand)
        if short:
            report.notes.append(f"A shortened run ({epochs} epochs): a check, not a measurement.")


def test_accuracy_in_float32(capsys: pytest.CaptureFixture[str], short: bool) -> None:
    """A shortened training is not through: it has to show that it learns (chance is 10 %)."""
    with capsys.disabled():
        run = train(slots(4), torch.float32, SHORT_EPOCHS if short else EPOCHS)
    assert run.accuracy() >= (0.80 if short else 0.96)


def test_loss_curve_in_float64_is_that_of_one_slot(
    capsys: pytest.CaptureFixture[str], report: Report, short: bool
) -> None:
    epochs = 2 if short else EPOCHS
    with capsys.disabled():
        one, four = (train(slots(n), torch.float64, epochs) for n in (1, 4))
    difference = max(abs(a - b) for a, b in zip(one.losses, four.losses, strict=True))
    report.notes.append(
        f"In float64 the loss curves of 1 and 4 slots differ by at most {difference:.1e}\n"
        f"in {len(one.losses)} steps, in which the loss falls from {one.losses[0]:.2f} "
        f"to {one.losses[-1]:.2f}."
    )
    assert difference <= 1e-9
    assert four.accuracy() == one.accuracy()
