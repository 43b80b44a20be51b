"""The memory of persistent copies: if ``forward`` gives a copy other memory, the next call takes that away again.

``forward`` does so with ``set_``, as ``flatten_parameters`` of torch's RNNs does on CUDA, or with ``.data =``. The next
call writes new values to the memory that the copy was made with, so the copy has to have that memory again. This file
does not write values. Only ``composable.persistent_tensors`` uses it.
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
        self._places = self._read()

    def restore(self) -> bool:
        """Gives each copy its memory back and leaves its version as it is.

        Returns ``False`` if that memory is gone, because its storage has been resized.
        """
        places = self._read()
        if places == self._places:
            return True
        for copy, memory, now, before in zip(
            self._copies, self._memory, zip(*places, strict=True), zip(*self._places, strict=True), strict=True
        ):
            if now != before:
                copy.data = memory
        return self._read() == self._places

    def _read(self) -> list[list[Any]]:
        """The addresses of the copies' elements, and their layouts."""
        return [list(map(read, self._copies)) for read in self._reads]
