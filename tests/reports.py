"""A report of an invented machine, for tests of its text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dataparallel.tracing.report import Report


def make_report(devices: tuple | list = (), **changes: Any) -> Report:
    made = Report(
        versions="2.13.0 (CUDA 13.0), Python 3.11.7",
        cpu="8 cores, 4 for this process",
        devices=tuple(torch.device(device) for device in devices),
        nvml=["not asked: nvidia-ml-py is not installed"],
        nccl="2.27.5",
        cupy="not installed",
        transports={"broadcast": "copy: it works everywhere"},
        reuse="yes",
    )
    return replace(made, **changes)
