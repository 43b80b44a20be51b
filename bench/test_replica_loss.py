"""Peak memory of the first device beside the others, with the loss on the replicas and with gathered outputs.

A training step without an optimizer of a GPT with 50,000 classes on 8 simulated devices. With the loss on the replicas
the first device may have 1.1 times the memory of the others. That fails no test: the report says it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from child_processes import environment
from reporting import Report

SCRIPT = Path(__file__).with_name("replica_loss.py")
BAR = 1.1

CAPTION = """\
Peak MiB of the devices in a training step (forward, loss and backward) of a GPT of width 256 with 4 blocks and 50,000
classes, 8 samples of 128 tokens on each of 8 simulated devices. Parameters are on the first device, and their gradients
are summed there.

loss
    "on the first device": outputs are gathered, and the loss is computed from them. "on the replicas": the model was
    given its loss, and outputs are not gathered.
first/others
    The peak of the first device over the highest one of the others. On the replicas it should be at most 1.1."""


@dataclass(frozen=True)
class Row:
    """One form with the loss in one place."""

    form: str
    on_replicas: bool
    first_mib: float
    others_mib: float

    def cells(self) -> dict[str, str]:
        ratio = self.first_mib / self.others_mib
        return {
            "form": self.form,
            "loss": "on the replicas" if self.on_replicas else "on the first device",
            "first device": f"{self.first_mib:,.0f}",
            "others, at most": f"{self.others_mib:,.0f}",
            "first/others": f"{ratio:.2f}",
            "at most 1.1": ("yes" if ratio <= BAR else "no") if self.on_replicas else "",
        }


def test_peak_memory(reports: list[Report], short: bool) -> None:
    if short:
        pytest.skip("short")
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    report = Report("replica_loss", CAPTION)
    report.rows += [Row(row["form"], row["on_replicas"], row["mib"][0], max(row["mib"][1:])) for row in rows]
    reports.append(report)
