"""The memory of copies that stay: other memory that ``forward`` gives to one is gone at the next call.

``forward`` may give a tensor other memory: by ``set_``, as ``flatten_parameters`` of torch's RNNs does on CUDA, or by
``.data =``. The next call's values go to the memory that the copy was made with, so that is given back to it before.
Only ``composable.persistent_tensors`` uses this room; what the memory is filled with is not its business.
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
    """The memory that ``copies``, strided tensors, have now."""

    def __init__(self, copies: Sequence[Tensor]) -> None:
        self._copies = copies
        self._own = [copy.data for copy in copies]
        self._reads = (*_READS, Tensor.is_conj) if any(copy.is_complex() for copy in copies) else _READS
        self._places = self._read()

    def put_back(self) -> bool:
        """Gives copies that have other memory their own again; their versions stay what they are.

        Returns ``False`` if it is gone, because its storage has been resized.
        """
        places = self._read()
        if places == self._places:
            return True
        for copy, own, now, before in zip(
            self._copies, self._own, zip(*places, strict=True), zip(*self._places, strict=True), strict=True
        ):
            if now != before:
                copy.data = own
        return self._read() == self._places

    def _read(self) -> list[list[Any]]:
        """Where the copies' elements are, and how they lie there."""
        return [list(map(read, self._copies)) for read in self._reads]
