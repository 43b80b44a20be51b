"""A packed batch, with all sequences in one row, becomes a batch with a padded row for each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dataparallel import DataParallel
from dataparallel.integrations.packing import unpacked

pytestmark = pytest.mark.devices("cpu")

lengths = st.lists(st.integers(2, 7), min_size=1, max_size=6)


def packed(sizes, first=0):
    """The sequences, and the row in which they come one after the other, as collators make it."""
    rows = [torch.arange(1, size + 1) + 10 * number for number, size in enumerate(sizes)]
    labels = [torch.cat([torch.tensor([-100]), row[1:]]) for row in rows]
    row = {
        "input_ids": torch.cat(rows)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(size) + first for size in sizes])[None],
    }
    return rows, row


def offsets(sizes):
    ends = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).to(torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(sizes), "max_length_k": max(sizes)}


@given(lengths, st.sampled_from([0, 2]), st.booleans())
def test_each_sequence_has_a_row(sizes, first, with_offsets):
    rows, batch = packed(sizes, first)
    found = unpacked({**batch, **(offsets(sizes) if with_offsets else {}), "use_cache": False}, pad_token=99)
    if len(sizes) == 1 and not with_offsets:
        assert torch.equal(found["input_ids"], batch["input_ids"])
        return
    assert [*found] == ["input_ids", "labels", "position_ids", "use_cache", "attention_mask"]
    assert found["input_ids"].shape == (len(sizes), max(sizes))
    for number, row in enumerate(rows):
        size = len(row)
        assert found["input_ids"][number].tolist() == [*row.tolist(), *[99] * (max(sizes) - size)]
        assert found["labels"][number].tolist() == [-100, *row[1:].tolist(), *[-100] * (max(sizes) - size)]
        assert found["position_ids"][number, :size].tolist() == [*range(first, first + size)]
        assert found["attention_mask"][number].tolist() == [*[1] * size, *[0] * (max(sizes) - size)]


def test_what_fills_the_row_at_its_end_is_left_out():
    _, batch = packed([3, 2, 1, 1])
    assert unpacked(batch)["input_ids"].tolist() == [[1, 2, 3], [11, 12, 0]]


@pytest.mark.parametrize("batch", [packed([5])[1], {"input_ids": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}])
def test_another_batch_stays_as_it_is(batch):
    assert unpacked(batch) is batch


def test_the_error_of_a_packed_batch_says_what_to_do(slots):
    class Model(nn.Module):
        def forward(self, input_ids, **others):
            return input_ids

    batch = {**packed([3, 4])[1], **offsets([3, 4])}
    with pytest.raises(ValueError, match=r"the batch is packed, with all sequences in one row.*unpacked\(batch\)"):
        DataParallel(Model(), slots)(**batch)
    assert DataParallel(Model(), slots)(**unpacked(batch)).shape == (2, 4)
