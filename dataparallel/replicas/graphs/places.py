"""Tensors with fixed places, which captured graphs read and write: outputs, and gradients.

``captured`` uses this file, and ``calls`` asks which tensors lie in a graph's memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from dataparallel.comm.buckets import flatten, plan_buckets, unflatten


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

    def apart(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy if it is in a graph's memory."""
        return tensor.clone() if tensor.device == self.device and self.holds(tensor) else tensor

    def holds(self, tensor: Tensor) -> bool:
        """True if the tensor is an output of a capture, which stays where it is."""
        return tensor.untyped_storage().data_ptr() in self._outputs


class FlatGrads:
    """Gradients that a captured backward leaves in a few flat buffers, so that few copies take them out."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._count = len(grads)
        present = [i for i, grad in enumerate(grads) if grad is not None]
        tensors = cast("Sequence[Tensor]", grads)
        self._buckets, singles = plan_buckets(tensors, sys.maxsize, candidates=present, keep_repeats=False)
        if singles:
            raise RuntimeError("a gradient is sparse, or of a class of its own")
        self._flats = [flatten(bucket, tensors) for bucket in self._buckets]

    def copies(self) -> list[Tensor | None]:
        """New tensors with the gradients of the last launch."""
        found: list[Tensor | None] = [None] * self._count
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            for i, grad in zip(bucket.indices, unflatten(bucket, flat.clone()), strict=True):
                found[i] = grad
        return found
