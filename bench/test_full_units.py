"""How many units of a sharded model are full at once, and bytes at the peak, beside FSDP2, on two devices.

Random models of transformers with a unit for each block, and one whose blocks all get a condition that needs a
gradient. In T5 and BART all blocks of the decoder get the encoder's output, and in T5 all blocks share a bias that is
made in the first one. Both forms have to have the same gradients. How many units are full is told by the table, and
fails no test.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from full_units import DEVICES, WORKS, Found, by_fsdp, by_fully_shard
from gradients import assert_same_gradients
from places import Places
from reporting import Report
from sharded_memory_report import mebibytes
from simulator import simulator_notes

CAPTION = """\
A unit for each block and one for the rest, two devices with two short samples each, forward and backward. Both shard
the same modules on simulated devices, FSDP2 with a process and gloo for each of them.

full in forward, full in backward
    Most units whose parameters are full at once, the root's among them.
full parameters
    Their MiB.
peak in forward, peak in backward
    MiB of a device, with everything: shards, gradients, activations, and units that are gathered ahead."""

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)


@dataclass(frozen=True)
class Row(Found):
    """What was found of a model by one form."""

    model: str
    form: str

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "model": self.model,
            "units": str(self.units),
            "form": self.form,
            "full in\nforward": str(self.forward),
            "full in\nbackward": str(self.backward),
            "full\nparameters": mebibytes(self.full),
            "peak in\nforward": mebibytes(self.peak_forward),
            "peak in\nbackward": mebibytes(self.peak_backward),
        }


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("full_units", CAPTION, notes=simulator_notes(places)))
    return reports[-1]


@pytest.mark.parametrize("name", WORKS)
def test_units_full_at_once(name: str, places: Places, report: Report, tmp_path: Path) -> None:
    if not places.simulated:
        pytest.skip(f"only simulated devices count bytes: {places.why_not_simulated}")
    work = WORKS[name]
    if work.needs is not None:
        pytest.importorskip(work.needs)
    rows: dict[str, Found] = {}
    rows["fully_shard"], gradients = by_fully_shard(work, places.simulated[:DEVICES])
    rows["FSDP2"], expected = by_fsdp(work, tmp_path)
    assert_same_gradients(gradients, expected)
    report.rows += [Row(model=name, form=form, **vars(found)) for form, found in rows.items()]
