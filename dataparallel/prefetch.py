"""`prefetch`: a loader whose next batches are scattered while the devices compute on this one.

This room reads the loader ahead and says which tensors of a batch are sent where; ``streams.ahead`` sends them, and the
wrapper's scatter finds them there. It starts no thread: batches are read in the loop's own thread, between two
iterations. For users; nothing in the library calls it.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.data_parallel import DataParallel
from dataparallel.devices import CPU, resolve
from dataparallel.streams.ahead import Sender, SentBatch, can_be_sent
from dataparallel.structures import is_whole, tensors_in

__all__ = ["Prefetch", "prefetch"]

T = TypeVar("T")


def prefetch(loader: Iterable[T], model: DataParallel[Any], *, depth: int = 1) -> Prefetch[T]:
    """The loader's batches, whose tensors are copied to the model's slots while the batch before computes.

    The batches are the loader's own objects, unchanged: unpack them, read them, pass all or parts of them to ``model``.
    A tensor of a batch that is an argument of ``model``, as it is or within a container, has arrived on the slots
    already; one that is not (targets of a loss outside of the model) is a host tensor as ever, and was sent in vain::

        for inputs, targets in dataparallel.prefetch(loader, model):
            output = model(inputs)
            loss = loss_function(output, targets.to(output.device))

    What was sent serves one call, in its batch's turn of the loop. All else is copied in the call, as without
    ``prefetch``: results of operators on a batch, tensors that you changed in place, a second call, tensors that
    require gradients or are on a device already, sparse ones and subclasses, values of registered batch types. Changes
    through numpy or ``.data``, and of tensors made under ``inference_mode``, cannot be seen: make them in the loader.

    Copies run beside the compute from pinned memory; let the loader pin (``DataLoader(pin_memory=True)``), or each
    batch is copied into pinned memory first, in the loop's thread. A pinned batch may still be read when the call
    returns, until the loop asks for the next one: write to it before the call or not at all. From then on nothing
    reads it, and a loader may fill its memory again.

    With CPU slots, or where there is no accelerator, batches are handed through as the loop asks for them.

    Args:
        loader: any iterable; each loop over the result iterates over it anew.
        model: the wrapper that is called with the batches; its slots, ``dim`` and ``chunk_sizes`` decide what goes
            where.
        depth: how many batches are read, and sent, before the loop asks for them. Device memory holds as many more.

    Returns:
        An iterable, with the loader's ``len()``. An exception of the loader is raised where its batch would have come,
        and ends the iteration. A loop that stops early waits for the copies that are under way and lets go of them.

    Raises:
        TypeError: ``model`` is no `DataParallel`; ``loader`` cannot be iterated over; ``depth`` is no integer.
        ValueError: ``depth`` below 1.
    """
    if not isinstance(model, DataParallel):
        cls = type(model)
        raise TypeError(
            "prefetch needs the dataparallel.DataParallel that will be called with the batches; "
            f"got {cls.__module__}.{cls.__qualname__}"
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(f"prefetch reads batches from an iterable; got {type(loader).__name__}")
    if operator.index(depth) < 1:
        raise ValueError(f"depth={depth}: at least 1 batch has to be read ahead; without prefetch none is")
    return Prefetch(loader, model, depth)


@dataclass
class _Read:
    """What the loader gave: a batch, or an exception in its place; and what was sent of the batch."""

    batch: Any = None
    sent: SentBatch | None = None
    error: Exception | None = None

    def end(self) -> None:
        if self.sent is not None:
            self.sent.end()


class Prefetch(Generic[T]):
    """What `prefetch` returns. ``loader``, ``model`` and ``depth`` are what it was given."""

    def __init__(self, loader: Iterable[T], model: DataParallel[Any], depth: int) -> None:
        self.loader, self.model, self.depth = loader, model, depth

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        slots = [resolve(device) for device in self.model.device_ids]
        if all(slot == CPU for slot in slots):
            # "yield from" would close the loader's generator when the loop stops early.
            for batch in self.loader:  # noqa: UP028
                yield batch
            return
        sender, batches = Sender(slots), iter(self.loader)
        # The first is the loop's while it is in there. A suspended generator is closed when the loop drops it, so
        # the end below is reached however the loop ends.
        reads: deque[_Read] = deque()
        more = True
        try:
            while True:
                while more and len(reads) <= self.depth:
                    more = self._read(batches, sender, reads)
                if not reads:
                    return
                if reads[0].error is not None:
                    raise reads.popleft().error  # type: ignore[misc]
                yield reads[0].batch
                # Before the loader is asked again: it may fill the same memory with another batch.
                reads[0].end()
                reads.popleft()
        finally:
            for read in reads:
                read.end()

    def _read(self, batches: Iterator[T], sender: Sender, reads: deque[_Read]) -> bool:
        """Appends the loader's next batch, sent, or its exception; whether there may be more."""
        try:
            batch = next(batches)
            sent = sender.send(self._chunked(batch, sender.slots), self.model.dim)
        except StopIteration:
            return False
        except Exception as error:  # raised where its batch would have come, after those before it
            reads.append(_Read(error=error))
            return False
        reads.append(_Read(batch, sent))
        return True

    def _chunked(self, batch: T, slots: Sequence[torch.device]) -> Iterator[tuple[Tensor, list[int] | None]]:
        """The tensors to send, once each, with the chunk sizes of a call that gets them.

        Tensors of one batch may disagree about its size, as long as no call gets both. What cannot be split as the
        model is set is left to the call that gets it, if any: it says why not.
        """
        dim, given = self.model.dim, self.model.chunk_sizes
        for tensor in {id(tensor): tensor for tensor in tensors_in(batch)}.values():
            if not can_be_sent(tensor):
                continue
            if is_whole(tensor):
                yield tensor, None
            elif -tensor.dim() <= dim < tensor.dim():
                size = tensor.shape[dim]
                if given is None:
                    yield tensor, comm.near_equal_sizes(size, len(slots))
                elif len(given) == len(slots) and sum(given) == size and min(given) > 0:
                    yield tensor, list(given)
