"""Other libraries, and the machine: ``transformers``, ``accelerate`` and ``lightning`` have classes for the trainers of
these libraries, and each imports its library. ``machine`` describes what is there.
"""

from __future__ import annotations

from typing import Literal, get_args

Form = Literal["replicate", "DataParallel", "fully_shard"]
"""The names by which trainers choose a form."""

NAMES: tuple[str, ...] = get_args(Form)
