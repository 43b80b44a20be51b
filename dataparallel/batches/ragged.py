"""`RaggedCopies` scatters sparse CSR matrices and jagged nested tensors along their rows, and `joined` gathers them.

Both layouts store all values in one tensor, and the place where each row begins in offsets: ``crow_indices()`` of a CSR
matrix, ``offsets()`` of a jagged tensor. ``autograd.functions`` move these tensors, and their gradients back.
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
    """Says that a chunk's offsets are chunk ``place`` of ``chunks``, cut from ``offsets`` (a weak reference)."""

    offsets: Any
    place: int
    chunks: int


class _Components(NamedTuple):
    """The plain tensors of which a CSR matrix or a jagged tensor consists.

    Attributes:
        offsets: where the values of each row begin, and at last where they end.
        values: the tensors that ``offsets`` divide into rows; the first has the gradients.
        dim: the dimension of ``values`` along which they are divided.
        lengths: how many values each row has, if there are gaps between rows.
    """

    offsets: Tensor
    values: list[Tensor]
    dim: int
    lengths: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Components:
        if tensor.layout is torch.sparse_csr:
            return cls(tensor.crow_indices(), [tensor.values(), tensor.col_indices()], 0, None)
        nested: Any = tensor
        return cls(nested.offsets(), [nested.values()], _ragged_dim(tensor) - 1, nested.lengths())

    @property
    def is_jagged(self) -> bool:
        return len(self.values) == 1

    def build(self, like: Tensor) -> Tensor:
        """Returns the ragged tensor of these components, with the layout and the width of ``like``."""
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
    """Returns why a tensor cannot be split along ``dim``, and what to do; ``None`` if it can be split."""
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

    For torch two jagged tensors have equal shapes only if both have the same offsets object. So tensors that share
    offsets share them on each slot, and after `joined` too. If the offsets of joined tensors are those of all chunks of
    one scatter, the result gets the offsets of the scattered tensor, and can be added to the scattered tensor.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self._slots = slots
        # The key has the id of a tensor. The entry holds this tensor, so that no other tensor gets the id.
        self._cache: dict[tuple[int, bool], tuple[Tensor, Sequence[Tensor]]] = {}

    def chunks(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Cuts the tensor along its rows. The host reads offsets, so it waits if they are on an accelerator."""
        if len(sizes) == 1:
            return self.copies(tensor)
        source = _Components.of(tensor)
        bounds = [0, *accumulate(sizes)]
        ends: list[int] = source.offsets.cpu()[bounds].tolist()
        counts = [end - start for start, end in pairwise(ends)]
        offsets = self._cached(source.offsets, True, lambda: self._cut_offsets(source, bounds, ends))
        lengths: Sequence[Tensor | None] = [None] * len(sizes)
        if source.lengths is not None:
            all_lengths = source.lengths
            lengths = self._cached(all_lengths, True, lambda: Scatter.apply(self._slots, sizes, 0, all_lengths))
        values = [
            Scatter.apply(self._slots, counts, source.dim, each.narrow(source.dim, ends[0], sum(counts)))
            for each in source.values
        ]
        return [
            _Components(slot_offsets, slot_values, source.dim, slot_lengths).build(tensor)
            for slot_offsets, slot_lengths, *slot_values in zip(offsets, lengths, *values, strict=True)
        ]

    def copies(self, tensor: Tensor) -> list[Tensor]:
        """Copies the whole tensor to each slot."""
        source, count = _Components.of(tensor), len(self._slots)
        offsets = self._cached(source.offsets, False, lambda: self._copy_offsets(source))
        lengths: Sequence[Tensor | None] = [None] * count
        if source.lengths is not None:
            all_lengths = source.lengths
            lengths = self._cached(all_lengths, False, lambda: Broadcast.apply(self._slots, all_lengths))
        flat = Broadcast.apply(self._slots, *source.values)
        width = len(source.values)
        return [
            _Components(offsets[k], list(flat[k * width : (k + 1) * width]), source.dim, lengths[k]).build(tensor)
            for k in range(count)
        ]

    def _cached(self, source: Tensor, is_cut: bool, make: Any) -> Sequence[Tensor]:
        """Returns what ``make`` has returned for ``source``. It is called once for chunks and once for copies."""
        key = id(source), is_cut
        if key not in self._cache:
            self._cache[key] = source, make()
        return self._cache[key][1]

    def _copy_offsets(self, source: _Components) -> Sequence[Tensor]:
        if source.is_jagged and source.lengths is None:
            total = source.values[0].shape[source.dim]
            return [_offsets_on(slot, source.offsets, total) for slot in self._slots]
        copies: Sequence[Tensor] = Broadcast.apply(self._slots, source.offsets)
        return copies

    def _cut_offsets(self, source: _Components, bounds: list[int], ends: list[int]) -> Sequence[Tensor]:
        """Returns the offsets of each chunk, from 0 on. The end of a chunk is also the start of the next one."""
        cuts = [source.offsets[a : b + 1] - start for (a, b), start in zip(pairwise(bounds), ends, strict=False)]
        chunks: Sequence[Tensor] = Scatter.apply(self._slots, [len(cut) for cut in cuts], 0, torch.cat(cuts))
        if source.is_jagged and ends[0] == 0 and source.lengths is None:
            # All values are in rows, so joined chunks have the offsets of the source again.
            for place, chunk in enumerate(chunks):
                setattr(chunk, _ORIGIN, _Origin(weakref.ref(source.offsets), place, len(chunks)))
        return chunks


def why_not_joinable(tensors: Sequence[Tensor]) -> str | None:
    """Returns why jagged outputs of replicas cannot be joined; ``None`` if they can."""
    shapes = [[size if isinstance(size, int) else "*" for size in tensor.shape] for tensor in tensors]
    for replica, tensor in enumerate(tensors):
        if shapes[replica][1:] != shapes[0][1:]:
            return f"replica 0 has shape {_shown(shapes[0])}, replica {replica} has {_shown(shapes[replica])}"
        if tensor.dtype != tensors[0].dtype:
            return f"replica 0 has dtype {tensors[0].dtype}, replica {replica} has {tensor.dtype}"
    return None


def joined(tensors: Sequence[Tensor], device: torch.device, cache: dict[Any, Any]) -> Tensor:
    """Joins the rows of all ``tensors`` on ``device``. Results of one gather share offsets through its ``cache``."""
    sources = [_Components.of(tensor) for tensor in tensors]
    dim = sources[0].dim
    values = [Gather.apply(device, dim, *each) for each in zip(*(source.values for source in sources), strict=True)]
    totals = [source.values[0].shape[dim] for source in sources]
    key = tuple(id(source.offsets) for source in sources)
    if key not in cache:  # the entry holds the offsets, so that no other tensors get their ids
        cache[key] = sources, _joined_offsets([source.offsets for source in sources], totals, device)
    offsets, lengths = cache[key][1], None
    if any(source.lengths is not None for source in sources):
        all_lengths = [source.offsets.diff() if source.lengths is None else source.lengths for source in sources]
        key = tuple(id(each) for each in all_lengths)
        if key not in cache:
            cache[key] = all_lengths, Gather.apply(device, 0, *all_lengths)
        lengths = cache[key][1]
    return _Components(offsets, values, dim, lengths).build(tensors[0])


def _joined_offsets(offsets: Sequence[Tensor], totals: Sequence[int], device: torch.device) -> Tensor:
    origins: list[_Origin | None] = [getattr(each, _ORIGIN, None) for each in offsets]
    if [origin and origin[1:] for origin in origins] == [(place, len(offsets)) for place in range(len(offsets))]:
        sources = {id(source): source for origin in origins if origin and (source := origin.offsets()) is not None}
        if len(sources) == 1:
            (source,) = sources.values()
            return _offsets_on(device, source, sum(totals))
    starts = [0, *accumulate(totals)]
    shifted = [each[:-1] + start for each, start in zip(offsets, starts, strict=False)]
    shifted[-1] = offsets[-1] + starts[len(offsets) - 1]
    result: Tensor = Gather.apply(device, 0, *shifted)
    return result


def _offsets_on(device: torch.device, offsets: Tensor, total: int) -> Tensor:
    """Copies the offsets of ``total`` values to ``device``. For torch the copy stands for the same ragged shape."""
    if offsets.device == device:
        return offsets
    # torch keeps the ragged shape when it moves a jagged tensor, so a jagged tensor without memory is moved.
    empty = torch.nested.nested_tensor_from_jagged(torch.empty(total, 0, device=offsets.device), offsets)
    moved: Any = empty.to(device)
    moved_offsets: Tensor = moved.offsets()
    return moved_offsets


def _ragged_dim(tensor: Tensor) -> int:
    return next(dim for dim, size in enumerate(tensor.shape) if not isinstance(size, int))


def _shown(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))})"
