"""Tensor objects: what a copy keeps of the original beside its data, and a second object on the same memory.

It copies no data. ``comm`` calls it, and so do ``structures`` and the rooms that hand copies to replicas.
"""

from __future__ import annotations

from torch import Tensor

from dataparallel.comm.buckets import PLAIN_TYPES

__all__ = ["alias", "same_kind"]


def same_kind(new: Tensor, original: Tensor) -> Tensor:
    """``new``, which holds a copy of the data of ``original``, with the class and the Python attributes of that."""
    if type(new) is Tensor and type(original) not in PLAIN_TYPES:
        new = new.as_subclass(type(original))
    if original.__dict__:
        new.__dict__.update(original.__dict__)
    return new


def alias(tensor: Tensor, slot: int) -> Tensor:
    """A new tensor object on the same memory, without a graph, with the same class and Python attributes.

    On slot 0 it shares the version counter of ``tensor``, so that autograd notices if the source changes before
    backward. On other slots it has a version counter of its own: otherwise autograd would take an in-place change by
    one replica for a change of all of them.
    """
    return same_kind(tensor.data if slot else tensor.detach(), tensor)
