"""Tensors with fixed places, which captured graphs read and write: outputs, and gradients.

``captured`` uses this file, and ``calls`` asks which tensors lie in a graph's memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from dataparallel.comm.buckets import flatten_into, plan_buckets, unflatten
from dataparallel.replicas.graphs.launch import reads


class CapturePlace:
    """A device, and which tensors on it have fixed places.

    Attributes:
        is_capturing: true while a thread captures here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_capturing = False
        self._outputs: set[int] = set()
        self._grads: dict[Hashable, Tensor] = {}

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside the block a thread captures here."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def note_outputs(self, tensors: Sequence[Tensor], capture: object) -> None:
        """Notes the outputs of a capture, as long as it lives."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._outputs |= addresses
        weakref.finalize(capture, self._outputs.difference_update, addresses)

    def note_grads(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], capture: object) -> None:
        """Notes where the backward of a capture reads the gradients of its outputs, as long as it lives."""
        found = {_where(output): grad for output, grad in zip(outputs, grads, strict=True)}
        self._grads.update(found)
        weakref.finalize(capture, _remove, self._grads, [*found])

    def claim_grad(self, tensor: Tensor) -> Tensor | None:
        """Where the gradient of ``tensor`` is read, if the launch of a capture has made it.

        Only the first capture that takes the tensor writes there. Gradients of others are added to it afterwards.
        """
        grad = self._grads.get(_where(tensor))
        return self._grads.pop(_where(tensor)) if reads(tensor.grad_fn, grad) else None

    def apart(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy if it is in a graph's memory."""
        return tensor.clone() if tensor.device == self.device and self.holds(tensor) else tensor

    def holds(self, tensor: Tensor) -> bool:
        """True if the tensor is an output of a capture, which stays where it is."""
        return tensor.untyped_storage().data_ptr() in self._outputs


def _where(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _remove(places: dict[Hashable, Tensor], keys: list[Hashable]) -> None:
    for key in keys:
        places.pop(key, None)


class FlatGrads:
    """Gradients that a captured backward leaves in a few flat buffers, so that few copies take them out.

    ``targets``: a gradient with a target is copied there instead, where the backward that comes next reads it.
    ``buffers``: for each dtype a buffer with room for all gradients.
    """

    def __init__(
        self,
        grads: Sequence[Tensor | None],
        targets: Sequence[Tensor | None],
        buffers: Mapping[torch.dtype, Tensor],
    ) -> None:
        self._targets = [None if grad is None else target for grad, target in zip(grads, targets, strict=True)]
        for grad, target in zip(grads, self._targets, strict=True):
            if grad is not None and target is not None:
                target.copy_(grad)
        present = [i for i, grad in enumerate(grads) if grad is not None and self._targets[i] is None]
        tensors = cast("Sequence[Tensor]", grads)
        self._buckets, singles = plan_buckets(tensors, sys.maxsize, candidates=present, keep_repeats=False)
        if singles:
            raise RuntimeError("a gradient is sparse, or of a class of its own")
        self._flats: list[Tensor] = []
        for bucket in self._buckets:  # there is one for each dtype
            flat = buffers[tensors[bucket.indices[0]].dtype][: sum(layout.numel for layout in bucket.layouts)]
            flatten_into(bucket, tensors, flat)
            self._flats.append(flat)

    def taken(self, direct: Collection[int]) -> list[Tensor | None]:
        """The gradients of the last launch, in new tensors. Those at positions in ``direct`` are in their targets."""
        found = [
            None if target is None else target.detach() if i in direct else target.clone()
            for i, target in enumerate(self._targets)
        ]
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            for i, grad in zip(bucket.indices, unflatten(bucket, flat.clone()), strict=True):
                found[i] = grad
        return found
