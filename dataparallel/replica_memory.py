"""The memory of replicas' tensors that stay: if ``forward`` gives a copy other memory, that is taken away again.

``forward`` does so with ``set_``, with ``.data =``, or as ``flatten_parameters`` of torch's RNNs does on CUDA. New
values are written to the memory that the copy was made with, so the copy has to have that memory again. This file does
not write values. ``composable.persistent_tensors`` and ``units.memory`` use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

__all__ = ["MemoryOfCopies"]

# Functions in C: they are called for thousands of tensors at each call.
_READS: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.data_ptr,
    Tensor.stride,
    attrgetter("shape"),
    attrgetter("dtype"),
)


class MemoryOfCopies:
    """Remembers the memory that ``copies``, which are strided tensors, have now."""

    def __init__(self, copies: Sequence[Tensor]) -> None:
        self._copies = copies
        self._memory = [copy.data for copy in copies]
        self._reads = (*_READS, Tensor.is_conj) if any(copy.is_complex() for copy in copies) else _READS
        self._places = self._read(copies)

    def restore(self) -> bool:
        """Gives each copy its memory back and leaves its version as it is.

        Returns ``False`` if that memory is somewhere else now, because its storage has been resized.
        """
        found = self._read(self._copies)
        if found == self._places:
            return True
        places = self._read(self._memory)
        for copy, memory, now, own in zip(
            self._copies, self._memory, zip(*found, strict=True), zip(*places, strict=True), strict=True
        ):
            if now != own:
                copy.data = memory
        return places == self._places

    def _read(self, tensors: Sequence[Tensor]) -> list[list[Any]]:
        """The addresses of the elements of ``tensors``, and their layouts."""
        return [list(map(read, tensors)) for read in self._reads]
