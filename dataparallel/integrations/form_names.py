"""The names by which the integrations of other libraries choose a form. Only they use them."""

from __future__ import annotations

from typing import Literal, get_args

Form = Literal["replicate", "DataParallel", "fully_shard"]


def check_form(form: str) -> None:
    """Raises ``ValueError`` if there is no form of this name."""
    if form not in get_args(Form):
        raise ValueError(f"form={form!r}: expected one of {', '.join(map(repr, get_args(Form)))}")
