"""The names by which the integrations of other libraries choose a form. Only they use them."""

from __future__ import annotations

from typing import Literal, get_args

Form = Literal["replicate", "DataParallel", "fully_shard"]
NAMES: tuple[str, ...] = get_args(Form)
