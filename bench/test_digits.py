"""How fast a whole training is on 1 to 8 slots, and whether it is the same training on one slot and on several.

A small residual network learns to read scikit-learn's 1,797 handwritten digits, on the machine's accelerators where it
has any, otherwise on CPU slots and on simulated devices. With accelerators there are also rows with one slot on each
of 2, 4 ... and all devices. What is asserted:

- In float32 on 4 slots at least 96 % of the 360 test scans are read correctly.
- In float64 the loss curve on 4 slots, and on 4 simulated devices with their clocks on, is that of one slot to 1e-9,
  over the whole training.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from digits import EPOCHS, TrainingRun, largest_difference, train
from places import Places, computing_devices, slots_on
from progress import Progress
from reporting import Report
from throughput_report import CAPTION, compare, plot
from ways import by_hand

SHORT_EPOCHS = 6
SHORT_ROUNDS = 3


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("digits", CAPTION, plot))
    return reports[-1]


def placements(places: Places, most: int) -> list[list[torch.device]]:
    """1, 2, 4 ... ``most`` slots on the first device, one on each of 2, 4 ... all devices, and on simulated ones."""
    real, simulated = places.real, places.simulated
    counts = [2**i for i in range(most.bit_length())]
    shared = [real[:1] * n for n in counts]
    several = range(2, len(real) + 1)
    distinct = [real[:n] for n in several if n in counts or n == len(real)]
    return shared + distinct + [simulated[:n] for n in counts if simulated]


def test_training_throughput(
    benchmark: BenchmarkFixture, progress: Progress, report: Report, places: Places, short: bool
) -> None:
    """A round trains one epoch with every number of slots, one after the other.

    So all of them meet the same noise, and the report compares epochs of the same round. All of them do the same
    training, because the whole batch is the same for every number of slots.
    """
    epochs = SHORT_ROUNDS if short else EPOCHS
    with places.clocks_off():
        runs = [TrainingRun(where, epochs=epochs) for where in placements(places, 4 if short else 8)]
        # Where slots share what computes, the same chunks can be called without the library.
        without = {
            run: TrainingRun(run.slots, epochs=epochs, way=by_hand) for run in runs if computing_devices(run.slots) == 1
        }

        def train_one_epoch_each() -> None:
            for run in runs:
                run.train_epoch()
                if run in without:
                    without[run].train_epoch()
            bar.update()

        with progress("throughput", epochs) as bar:
            benchmark.pedantic(train_one_epoch_each, rounds=epochs)
        rows = compare(runs, without) if benchmark.enabled else []
    report.rows += rows
    if not places.simulated:
        report.notes.append(f"Nothing was simulated: {places.why_not_simulated}.")
    if rows and short:
        report.notes.append(f"A shortened run ({epochs} epochs): a check, not a measurement.")


def test_accuracy_in_float32(progress: Progress, places: Places, short: bool) -> None:
    """A short training only has to show that it learns (chance is 10 %)."""
    epochs = SHORT_EPOCHS if short else EPOCHS
    with progress("float32 on 4 slots", epochs) as bar:
        run = train(slots_on(places.real, 4), torch.float32, epochs, bar.update)
    assert run.accuracy() >= (0.80 if short else 0.96)


@pytest.fixture(scope="module")
def one_slot(places: Places, short: bool) -> TrainingRun:
    """The training in float64 that others are compared with."""
    return train(places.real[:1], torch.float64, 2 if short else EPOCHS)


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_loss_curve_in_float64_is_that_of_one_slot(
    kind: str, one_slot: TrainingRun, progress: Progress, report: Report, places: Places
) -> None:
    """On simulated devices the clocks check every access to memory as well."""
    devices = places.real if kind == "real" else places.simulated
    if not devices:
        pytest.skip(places.why_not_simulated)
    epochs = len(one_slot.epoch_seconds)
    with progress("float64 on 4 slots", epochs) as bar:
        four = train(slots_on(devices, 4), torch.float64, epochs, bar.update)
    difference = largest_difference(one_slot, four)
    where = "4 slots" if kind == "real" else "4 simulated devices, with their clocks on,"
    report.notes.append(
        f"In float64 the loss curves of 1 slot and of {where} differ by at most {difference:.1e} "
        f"in {len(four.losses)} steps, in which the loss falls from {four.losses[0]:.2f} "
        f"to {four.losses[-1]:.2f}."
    )
    assert difference <= 1e-9
    assert four.accuracy() == one_slot.accuracy()
