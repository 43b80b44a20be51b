"""`unpacked` makes a batch with a row for each sequence of a packed one, which has them one after the other in one row.

Packed batches come from ``SFTConfig(packing=True)`` of TRL and from ``DataCollatorWithFlattening`` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_OF_PACKED_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_NO_LABEL = -100


def unpacked(batch: Mapping[str, Any], pad_token: int = 0) -> Mapping[str, Any]:
    """Returns the batch with a row for each packed sequence, so that it can be split among slots.

    The sequences begin where ``cu_seq_lens_q`` says, or else where ``position_ids`` do not go on by one. Each is filled
    at its end up to the longest one: ``input_ids`` with ``pad_token``, ``labels`` with -100, other tensors with 0. An
    ``attention_mask`` says where they end. So the loss of a causal language model stays the same. Sequences of a single
    token predict nothing: they are left out, unless there are no others.

    Args:
        batch: tensors of shape (1, tokens, ...), and further arguments of the model, which stay as they are. A batch
            that is not packed is returned itself.
        pad_token: any token.
    """
    ends = _ends(batch)
    if ends is None:
        return batch
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    kept = [length > 1 for length in lengths] if max(lengths) > 1 else [True] * len(lengths)
    made: dict[str, Any] = {}
    for name, value in batch.items():
        if name in _OF_PACKED_ROWS:
            continue
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, ends[-1]):
            blank = {"input_ids": pad_token, "labels": _NO_LABEL, "shift_labels": _NO_LABEL}.get(name, 0)
            parts = [part for part, is_kept in zip(value[0].split(lengths), kept, strict=True) if is_kept]
            value = pad_sequence(parts, batch_first=True, padding_value=blank)
        made[name] = value
    rows = torch.tensor([length for length, is_kept in zip(lengths, kept, strict=True) if is_kept])
    mask = torch.arange(int(rows.max())) < rows[:, None]
    return {**made, "attention_mask": mask.to(batch["input_ids"].device, torch.int64)}


def _ends(batch: Mapping[str, Any]) -> list[int] | None:
    """Returns where the sequences end in the only row of a packed batch; ``None`` for another batch."""
    ids, positions, offsets = (batch.get(name) for name in ("input_ids", "position_ids", "cu_seq_lens_q"))
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
        return None
    if isinstance(offsets, Tensor):
        ends: list[int] = offsets[1:].tolist()
        return ends
    if not isinstance(positions, Tensor) or positions.shape != ids.shape:
        return None
    starts = (positions[0].diff() != 1).nonzero().flatten() + 1
    return [*starts.tolist(), ids.shape[1]] if len(starts) else None
