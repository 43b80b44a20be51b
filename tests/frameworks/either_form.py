"""The two forms, for tests that are the same for both."""

import copy

import pytest
from torch import nn

from dataparallel import DataParallel
from dataparallel.composable import replicate

both_forms = pytest.mark.parametrize("form", ["DataParallel", "replicate"])


def in_form(form: str, model: nn.Module, slots: list, **options: object) -> nn.Module:
    """A copy of the model, wrapped or replicated; ``options`` are those of both forms."""
    model = copy.deepcopy(model)
    return (
        DataParallel(model, slots, **options) if form == "DataParallel" else replicate(model, devices=slots, **options)
    )
