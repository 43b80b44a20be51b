"""The main job, measured and judged: throughput on several slots, accuracy, equality with one slot.

On the machine's accelerators where it has any, else on CPU slots and on simulated devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from tqdm import tqdm

from digits import EPOCHS, TrainingRun, train
from places import Places, computing_devices
from reporting import Report
from throughput_report import CAPTION, compare, plot

SHORT_EPOCHS = 6
SHORT_ROUNDS = 3


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("digits", CAPTION, plot))
    return reports[-1]


def slots(devices: Sequence[torch.device], count: int) -> list[torch.device]:
    """`count` slots, dealt out in turn to the devices."""
    return [devices[i % len(devices)] for i in range(count)]


def placements(places: Places, most: int) -> list[list[torch.device]]:
    """1, 2, 4 ... `most` slots on the first device, then one on each of 2, 4 ... all; and as many simulated ones."""
    real, simulated = places.real, places.simulated
    counts = [2**i for i in range(most.bit_length())]
    shared = [real[:1] * n for n in counts]
    several = range(2, len(real) + 1)
    distinct = [real[:n] for n in several if n in counts or n == len(real)]
    return shared + distinct + [simulated[:n] for n in counts if simulated]


def test_training_throughput(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], report: Report, places: Places, short: bool
) -> None:
    """One round trains one epoch with every number of slots, one after the other.

    So all of them meet the same noise, and the report compares epochs of the same round. The whole
    batch is the same for every number of slots: they all do the same training.
    """
    epochs = SHORT_ROUNDS if short else EPOCHS
    with places.clocks_off():
        runs = [TrainingRun(where, epochs=epochs) for where in placements(places, 4 if short else 8)]
        # Where slots share what computes, the same chunks can be called without the library.
        by_hand = {
            run: TrainingRun(run.slots, epochs=epochs, by_hand=True)
            for run in runs
            if computing_devices(run.slots) == 1
        }

        def train_one_epoch_each() -> None:
            for run in runs:
                run.train_epoch()
                if run in by_hand:
                    by_hand[run].train_epoch()
            bar.update()

        with capsys.disabled(), tqdm(total=epochs, desc="throughput", unit="round", disable=None) as bar:
            benchmark.pedantic(train_one_epoch_each, rounds=epochs)
        rows = compare(runs, by_hand) if benchmark.enabled else []
    report.rows += rows
    if not places.simulated:
        report.notes.append(f"Nothing was simulated: {places.why_not_simulated}.")
    if rows and short:
        report.notes.append(f"A shortened run ({epochs} epochs): a check, not a measurement.")


def test_accuracy_in_float32(capsys: pytest.CaptureFixture[str], places: Places, short: bool) -> None:
    """A shortened training is not through: it has to show that it learns (chance is 10 %)."""
    with capsys.disabled():
        run = train(slots(places.real, 4), torch.float32, SHORT_EPOCHS if short else EPOCHS)
    assert run.accuracy() >= (0.80 if short else 0.96)


@pytest.fixture(scope="module")
def one_slot(places: Places, short: bool) -> TrainingRun:
    """The training in float64 that others are compared with."""
    return train(places.real[:1], torch.float64, 2 if short else EPOCHS)


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_loss_curve_in_float64_is_that_of_one_slot(
    kind: str, one_slot: TrainingRun, capsys: pytest.CaptureFixture[str], report: Report, places: Places
) -> None:
    """On simulated devices the clocks check every access to memory as well."""
    devices = places.real if kind == "real" else places.simulated
    if not devices:
        pytest.skip(places.why_not_simulated)
    with capsys.disabled():
        four = train(slots(devices, 4), torch.float64, len(one_slot.epoch_seconds))
    difference = max(abs(a - b) for a, b in zip(one_slot.losses, four.losses, strict=True))
    where = "4 slots" if kind == "real" else "4 simulated devices, with their clocks on,"
    report.notes.append(
        f"In float64 the loss curves of 1 slot and of {where} differ by at most {difference:.1e}\n"
        f"in {len(four.losses)} steps, in which the loss falls from {four.losses[0]:.2f} "
        f"to {four.losses[-1]:.2f}."
    )
    assert difference <= 1e-9
    assert four.accuracy() == one_slot.accuracy()
