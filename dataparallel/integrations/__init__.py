"""Programs and libraries that know nothing of this one: how they run with it.

``transformers``, ``accelerate`` and ``lightning`` have classes for the trainers of these libraries; each imports its
library. The others are for programs written for ``torch.nn.DataParallel``.
"""

from __future__ import annotations

from typing import Literal, get_args

Form = Literal["replicate", "DataParallel", "fully_shard"]
"""The names by which trainers choose a form."""

NAMES: tuple[str, ...] = get_args(Form)
