"""How sparse CSR matrices and jagged nested tensors are cut along their rows, moved and joined.

Both have values one after the other, and offsets that say where those of each row begin: ``crow_indices()`` of a CSR
matrix, ``offsets()`` of a jagged tensor. So both are cut into plain tensors, which travel by the functions of
``autograd.functions``, and built again on their device. Gradients go the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataparallel.autograd.functions import Broadcast, Gather, Scatter

_ORIGIN = "_dataparallel_cut_from"
"""Attribute of a chunk's offsets: `_Origin`."""


class _Origin(NamedTuple):
    """What a chunk's offsets were cut from, as a weak reference; the chunk's place, and how many chunks there are."""

    offsets: Any
    place: int
    chunks: int


class _Rows(NamedTuple):
    """A CSR matrix or a jagged tensor in parts.

    Attributes:
        offsets: where the values of each row begin, and at last where they end.
        values: what ``offsets`` cut along ``dim``; the first has the gradients.
        dim: a dimension of ``values``.
        lengths: how many values each row has, if there are gaps between rows.
    """

    offsets: Tensor
    values: list[Tensor]
    dim: int
    lengths: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Rows:
        if tensor.layout is torch.sparse_csr:
            return cls(tensor.crow_indices(), [tensor.values(), tensor.col_indices()], 0, None)
        nested: Any = tensor
        return cls(nested.offsets(), [nested.values()], _ragged_dim(tensor) - 1, nested.lengths())

    @property
    def is_jagged(self) -> bool:
        return len(self.values) == 1

    def built(self, like: Tensor) -> Tensor:
        """The tensor with these parts, of the layout and the width of ``like``."""
        if like.layout is torch.sparse_csr:
            values, columns = self.values
            size = (len(self.offsets) - 1, like.shape[1], *values.shape[1:])
            checked = torch.sparse.check_sparse_tensor_invariants.is_enabled()
            return torch.sparse_csr_tensor(self.offsets, columns, values, size, check_invariants=checked)
        return torch.nested.nested_tensor_from_jagged(self.values[0], self.offsets, self.lengths, self.dim + 1)


def is_ragged(tensor: Tensor) -> bool:
    """True for tensors of layout ``torch.sparse_csr`` or ``torch.jagged``."""
    return tensor.layout in (torch.sparse_csr, torch.jagged)


def why_not_split(tensor: Tensor, dim: int) -> str | None:
    """Why a tensor that is not strided cannot be split along ``dim``, with what to do; ``None`` if it can."""
    if tensor.is_nested and tensor.layout is not torch.jagged:
        return (
            "it is a nested tensor of layout torch.strided; make it with layout=torch.jagged, or pass its tensors as a "
            "list, dataparallel.samples(tensor.unbind())"
        )
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return f"its layout is {tensor.layout}; pass tensor.to_sparse_csr(), or mark it dataparallel.whole(...)"
    if tensor.layout is torch.sparse_csr and tensor.crow_indices().dim() > 1:
        return "it is a batch of CSR matrices; pass tensor.to_sparse(), or mark it dataparallel.whole(...)"
    if is_ragged(tensor):
        return (
            None if dim % tensor.dim() == 0 else f"tensors of layout {tensor.layout} are split along dimension 0 only"
        )
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return (
            f"its layout is {tensor.layout}; pass a strided or a sparse COO or CSR tensor, or mark it "
            "dataparallel.whole(...)"
        )
    return None


class RaggedCopies:
    """Makes the chunks and the copies of one scatter.

    torch takes two jagged tensors for equally ragged only if they have one offsets object. So tensors that share
    offsets share them on each slot, and after `joined` too. If all parts of a joined tensor have the offsets of the
    chunks of one scatter, it is as ragged as the tensor that was scattered, and may be added to it.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self._slots = slots
        # Keyed by id, with the tensor beside it so that the id stays taken.
        self._done: dict[tuple[int, bool], tuple[Tensor, Sequence[Tensor]]] = {}

    def chunks(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The tensor cut along its rows. The host reads offsets, so it waits if they are on an accelerator."""
        if len(sizes) == 1:
            return self.copies(tensor)
        rows = _Rows.of(tensor)
        bounds = [0, *accumulate(sizes)]
        ends: list[int] = rows.offsets.cpu()[bounds].tolist()
        counts = [end - start for start, end in pairwise(ends)]
        offsets = self._once(rows.offsets, True, lambda: self._cut_offsets(rows, bounds, ends))
        lengths: Sequence[Tensor | None] = [None] * len(sizes)
        if rows.lengths is not None:
            source = rows.lengths
            lengths = self._once(source, True, lambda: Scatter.apply(self._slots, sizes, 0, source))
        values = [
            Scatter.apply(self._slots, counts, rows.dim, each.narrow(rows.dim, ends[0], sum(counts)))
            for each in rows.values
        ]
        return [
            _Rows(of_slot[0], list(of_slot[2:]), rows.dim, of_slot[1]).built(tensor)
            for of_slot in zip(offsets, lengths, *values, strict=True)
        ]

    def copies(self, tensor: Tensor) -> list[Tensor]:
        """The whole tensor on each slot."""
        rows, count = _Rows.of(tensor), len(self._slots)
        offsets = self._once(rows.offsets, False, lambda: self._moved_offsets(rows))
        lengths: Sequence[Tensor | None] = [None] * count
        if rows.lengths is not None:
            source = rows.lengths
            lengths = self._once(source, False, lambda: Broadcast.apply(self._slots, source))
        flat = Broadcast.apply(self._slots, *rows.values)
        width = len(rows.values)
        return [
            _Rows(offsets[k], list(flat[k * width : (k + 1) * width]), rows.dim, lengths[k]).built(tensor)
            for k in range(count)
        ]

    def _once(self, source: Tensor, is_cut: bool, make: Any) -> Sequence[Tensor]:
        key = id(source), is_cut
        if key not in self._done:
            self._done[key] = source, make()
        return self._done[key][1]

    def _moved_offsets(self, rows: _Rows) -> Sequence[Tensor]:
        if rows.is_jagged and rows.lengths is None:
            total = rows.values[0].shape[rows.dim]
            return [_moved_offsets(rows.offsets, total, slot) for slot in self._slots]
        copies: Sequence[Tensor] = Broadcast.apply(self._slots, rows.offsets)
        return copies

    def _cut_offsets(self, rows: _Rows, bounds: list[int], ends: list[int]) -> Sequence[Tensor]:
        """For each chunk its offsets, from 0 on. Neighbours share the row where one ends and the other begins."""
        parts = [rows.offsets[a : b + 1] - start for (a, b), start in zip(pairwise(bounds), ends, strict=False)]
        chunks: Sequence[Tensor] = Scatter.apply(self._slots, [len(part) for part in parts], 0, torch.cat(parts))
        if rows.is_jagged and ends[0] == 0 and rows.lengths is None:
            # All values are in rows, so joined chunks have these offsets again.
            for place, chunk in enumerate(chunks):
                setattr(chunk, _ORIGIN, _Origin(weakref.ref(rows.offsets), place, len(chunks)))
        return chunks


def why_not_joinable(parts: Sequence[Tensor]) -> str | None:
    """Why jagged tensors cannot be joined, as a sentence on replicas; ``None`` if they can."""
    shapes = [[size if isinstance(size, int) else "*" for size in part.shape] for part in parts]
    for replica, part in enumerate(parts):
        if shapes[replica][1:] != shapes[0][1:]:
            return f"replica 0 has shape {_shown(shapes[0])}, replica {replica} has {_shown(shapes[replica])}"
        if part.dtype != parts[0].dtype:
            return f"replica 0 has dtype {parts[0].dtype}, replica {replica} has {part.dtype}"
    return None


def joined(parts: Sequence[Tensor], device: torch.device, done: dict[Any, Any]) -> Tensor:
    """The rows of all parts in order, on ``device``. By ``done``, a dict for each gather, results share offsets."""
    found = [_Rows.of(part) for part in parts]
    first = found[0]
    values = [Gather.apply(device, first.dim, *each) for each in zip(*(rows.values for rows in found), strict=True)]
    totals = [rows.values[0].shape[first.dim] for rows in found]
    key = tuple(id(rows.offsets) for rows in found)
    if key not in done:  # with the offsets, so that their ids stay taken
        done[key] = found, _joined_offsets([rows.offsets for rows in found], totals, device)
    lengths = None
    if any(rows.lengths is not None for rows in found):
        each_length = [rows.offsets.diff() if rows.lengths is None else rows.lengths for rows in found]
        key = tuple(id(length) for length in each_length)
        if key not in done:
            done[key] = each_length, Gather.apply(device, 0, *each_length)
        lengths = done[key][1]
    return _Rows(done[tuple(id(rows.offsets) for rows in found)][1], values, first.dim, lengths).built(parts[0])


def _joined_offsets(parts: Sequence[Tensor], totals: Sequence[int], device: torch.device) -> Tensor:
    origins: list[_Origin | None] = [getattr(part, _ORIGIN, None) for part in parts]
    if [origin and origin[1:] for origin in origins] == [(place, len(parts)) for place in range(len(parts))]:
        sources = {id(source): source for origin in origins if origin and (source := origin.offsets()) is not None}
        if len(sources) == 1:
            (source,) = sources.values()
            return _moved_offsets(source, sum(totals), device)
    starts = [0, *accumulate(totals)]
    shifted = [part[:-1] + start for part, start in zip(parts, starts, strict=False)]
    shifted[-1] = parts[-1] + starts[len(parts) - 1]
    result: Tensor = Gather.apply(device, 0, *shifted)
    return result


def _moved_offsets(offsets: Tensor, total: int, device: torch.device) -> Tensor:
    """The offsets of ``total`` values on ``device``, where they are as ragged for torch as the old ones."""
    if offsets.device == device:
        return offsets
    # What torch knows of them goes along with a tensor. This one has no memory.
    empty = torch.nested.nested_tensor_from_jagged(torch.empty(total, 0, device=offsets.device), offsets)
    moved: Any = empty.to(device)
    found: Tensor = moved.offsets()
    return found


def _ragged_dim(tensor: Tensor) -> int:
    return next(dim for dim, size in enumerate(tensor.shape) if not isinstance(size, int))


def _shown(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))})"
