"""The forms split batches by numbers of samples or by shares. That results do not depend on it: the state machine."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from each_form import FORMS


class Sizes(nn.Linear):
    """It returns how many samples each replica gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_tensor([len(x)])


def assign(form: str, model: Any, chunk_sizes: Any) -> None:
    if form == "DataParallel":
        model.options.chunk_sizes = chunk_sizes
    else:
        (replicate if form == "replicate" else fully_shard).state(model).options.chunk_sizes = chunk_sizes


@pytest.mark.parametrize("form", FORMS)
def test_chunk_sizes_may_be_assigned_between_calls(form: str, slots: list, root: torch.device) -> None:
    model = FORMS[form](Sizes(4, 5).to(root), slots, chunk_sizes=[1, 4, 2])
    for chunk_sizes, sizes in (([2, 2, 3], [2, 2, 3]), ([3.0, 1, 3], [3, 1, 3]), (None, [3, 3, 1])):
        assign(form, model, chunk_sizes)
        assert model(torch.zeros(7, 4, device=root)).tolist() == sizes
    with pytest.raises(ValueError, match="has 2 entries for 3 slots"):
        assign(form, model, [0.5, 0.5])
    with pytest.raises(ValueError, match="has 2 entries for 3 slots"):
        FORMS[form](Sizes(4, 5).to(root), slots, chunk_sizes=[0.5, 0.5])


def test_shares_are_checked_again_where_slots_have_changed(slots: list, root: torch.device) -> None:
    model = DataParallel(Sizes(4, 5).to(root), slots, chunk_sizes=[0.5, 1, 1])
    model.device_ids = model.device_ids[:2]
    with pytest.raises(ValueError, match="has 3 entries for 2 slots"):
        model(torch.zeros(7, 4, device=root))
