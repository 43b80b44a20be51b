"""Tensors with fixed places, which captured graphs read and write: outputs, and gradients.

``captured`` uses this file, and ``calls`` asks which tensors lie in a graph's memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from dataparallel import _torch


class Place:
    """A device, and which tensors on it have fixed places.

    Attributes:
        is_capturing: true while a thread captures here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_capturing = False
        self._outputs: set[int] = set()

    def note_outputs(self, tensors: Sequence[Tensor], capture: object) -> None:
        """Notes the outputs of a capture, as long as it lives."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._outputs |= addresses
        weakref.finalize(capture, self._outputs.difference_update, addresses)

    def holds(self, tensor: Tensor) -> bool:
        """True if the tensor is an output of a capture, which stays where it is."""
        return tensor.untyped_storage().data_ptr() in self._outputs


class FlatGrads:
    """Gradients that a captured backward leaves in one buffer for each dtype, so that one copy takes them out."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._layouts: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int] | None] = []
        sizes: dict[torch.dtype, int] = {}
        for grad in grads:
            if grad is None:
                self._layouts.append(None)
                continue
            begin = sizes.get(grad.dtype, 0)
            strides = torch.empty_like(grad, device="meta").stride()
            self._layouts.append((grad.dtype, grad.shape, strides, begin))
            sizes[grad.dtype] = begin + grad.numel()
        present = [grad for grad in grads if grad is not None]
        self._flats = {dtype: torch.empty(size, dtype=dtype, device=present[0].device) for dtype, size in sizes.items()}
        places = [view for view in self._views(self._flats) if view is not None]
        if present:
            _torch.foreach_copy_(places, present)

    def _views(self, flats: dict[torch.dtype, Tensor]) -> list[Tensor | None]:
        return [
            None if layout is None else flats[layout[0]].as_strided(layout[1], layout[2], layout[3])
            for layout in self._layouts
        ]

    def copies(self) -> list[Tensor | None]:
        """New tensors with the gradients of the last launch."""
        return self._views({dtype: flat.clone() for dtype, flat in self._flats.items()})
