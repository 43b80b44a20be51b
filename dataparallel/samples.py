"""`samples`: marks a list as a batch with one entry for each sample. ``batches.samples`` cuts, moves and joins it."""

from __future__ import annotations

from typing import TypeVar

from dataparallel import _torch
from dataparallel.arguments import checked

__all__ = ["Samples", "samples"]

T = TypeVar("T")


@_torch.walked_as_a_list  # so that units, which cast their inputs, find the tensors in it
class Samples(list[T]):
    """The list that `samples` returns: a batch with one entry for each sample, in order.

    In all other respects it is a list. Slices, sums and comprehensions of it are plain lists.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"samples({super().__repr__()})"


def samples(entries: list[T] | tuple[T, ...]) -> Samples[T]:
    """Marks a list as a batch with one entry for each sample: the targets of a detector, images of several sizes.

    A call splits it as it splits tensors, so it has as many entries as the tensors of the call have samples. Each
    replica gets a `Samples`, which is a list, with the entries of its chunk. An entry may be any object: a tensor of
    any shape, a number, a string, a nested structure. All tensors in it are moved to the replica's device, none is cut,
    and gradients reach them. One tensor in several entries is one tensor in each replica. Other leaves are handed on by
    reference.

    Return one from ``forward``, and the call joins those of all replicas: all entries in the order of the batch, on the
    output device. A plain list is joined element by element instead.

    .. code-block:: python

        losses = model(dataparallel.samples(images), dataparallel.samples(targets))

    Returns:
        A new list with the same entries. The argument itself is not marked. For a module that is not wrapped it is an
        ordinary list.

    Raises:
        TypeError: ``entries`` is no list or tuple.
    """
    hint = " with one entry for each sample; a tensor is split along its batch dimension anyway"
    return Samples(checked("entries", entries, list, tuple, hint=hint))
