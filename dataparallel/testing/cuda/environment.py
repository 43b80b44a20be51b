"""What the children of a process with a stand-in find in their environment.

``DATAPARALLEL_STAND_IN`` says which stand-in. In front of ``PYTHONPATH`` is a folder with a ``sitecustomize.py``, which
Python runs at its start: it starts the stand-in when the child imports torch. A child with another torch, for example
of another virtual environment, is left alone. `start` calls this file, and `children` in the child.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dataparallel.testing.cuda.machine import Machine

__all__ = ["FOLDER", "VARIABLE", "tell_children", "told"]

VARIABLE = "DATAPARALLEL_STAND_IN"
FOLDER = str(Path(__file__).with_name("inherited"))


def tell_children(machine: Machine, hide_gpus: bool, torch_file: Path) -> None:
    """Lets the processes that this one starts from now on have the same stand-in."""
    os.environ[VARIABLE] = json.dumps(
        {"devices": machine.devices, "like": machine.like, "hide_gpus": hide_gpus, "torch": str(torch_file)}
    )
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *(path for path in paths if path and path != FOLDER)])


def told() -> dict[str, Any] | None:
    """What the parent has told: ``devices``, ``like``, ``hide_gpus`` and ``torch``; ``None`` if nothing."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    found: dict[str, Any] = json.loads(text)
    return found
