"""`prefetch` wraps a loader and scatters its next batches while the devices compute on the current one.

``comm.streams.ahead`` sends tensors, and the scatter of the next call takes the chunks from there. Batches are read in
the loop's own thread, between two iterations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from dataparallel.arguments import checked
from dataparallel.batches.structures import is_whole, leaves
from dataparallel.call.options import CallOptions
from dataparallel.comm.streams.ahead import HostReads, SentBatch, can_be_sent, send
from dataparallel.devices import CPU, resolve
from dataparallel.forms.data_parallel import DataParallel, own_options
from dataparallel.forms.managed import ManagedModule, state_of

T = TypeVar("T")


def prefetch(loader: Iterable[T], model: nn.Module, *, depth: int = 1) -> Prefetch[T]:
    """Yields the loader's batches, and copies their tensors to the model's slots while it computes the previous batch.

    The batches are the loader's own objects, unchanged: unpack them, read them, pass all or parts of them to ``model``.
    A tensor that you pass to ``model``, directly or within a container, is on the slots already. A tensor that you do
    not pass (targets of a loss outside of the model) is still an ordinary host tensor, and was sent in vain::

        for inputs, targets in dataparallel.prefetch(loader, model):
            output = model(inputs)
            loss = loss_function(output, targets.to(output.device))

    Let the loader pin (``DataLoader(pin_memory=True)``). :ref:`loading-data` says what is sent ahead, and when one may
    write to it. With CPU slots, or without an accelerator, batches are read when the loop asks for them.

    Args:
        loader: any iterable; each loop over the result iterates over it again.
        model: what is called with the batches: a `DataParallel`, or a module after ``composable.replicate`` or
            ``fully_shard``. Its slots, ``dim`` and ``chunk_sizes`` decide which slot gets which samples.
        depth: how many batches are read and sent before the loop asks for them. The devices hold ``depth`` batches
            besides the current one.

    Returns:
        An iterable, with the loader's ``len()``. An exception in reading or sending a batch is raised in its place, and
        ends the iteration. A loop that stops early waits for the copies in flight and frees them.

    Raises:
        TypeError: ``model`` has no form; ``loader`` cannot be iterated over; ``depth`` is no integer.
        ValueError: ``depth`` is below 1.
    """
    if not isinstance(model, (DataParallel, ManagedModule)):
        cls = type(model)
        raise TypeError(
            "prefetch needs what will be called with the batches, a dataparallel.DataParallel or a module after "
            f"composable.replicate or fully_shard; got {cls.__module__}.{cls.__qualname__}"
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(f"prefetch reads batches from an iterable; got {type(loader).__name__}")
    return Prefetch(loader, model, checked("depth", depth, int, above=0))


class Prefetch(Generic[T]):
    """The iterable that `prefetch` returns. ``loader``, ``model`` and ``depth`` are the arguments of `prefetch`."""

    def __init__(self, loader: Iterable[T], model: nn.Module, depth: int) -> None:
        self.loader: Iterable[T] = loader
        self.model: nn.Module = model
        self.depth: int = depth

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        slots = [resolve(device) for device in _options_of(self.model).slots]
        if all(slot == CPU for slot in slots):
            # "yield from" would close the loader's generator when the loop stops early. A user may go on with it.
            for batch in self.loader:
                yield batch
            return
        batches = iter(self.loader)
        # The first one is the batch that the loop is using. A suspended generator is closed when the loop drops it, so
        # `finally` is reached however the loop ends.
        read: deque[tuple[T, SentBatch]] = deque()
        end: Exception | None = None  # of reading or sending, raised after the batches before it
        try:
            while True:
                while end is None and len(read) <= self.depth:
                    try:
                        batch, options = next(batches), _options_of(self.model)
                        read.append((batch, send(_chunked(batch, options, len(slots)), slots, options.dim)))
                    except Exception as error:
                        end = error
                if not read:
                    if isinstance(end, StopIteration):
                        return
                    assert end is not None
                    raise end
                yield read[0][0]
                # Before the loader is asked again: it may fill the same memory with another batch.
                _release(read[0][1])
                read.popleft()
        finally:
            end = None  # otherwise it would hold this frame, and the frame the error
            for _, sent in read:
                _release(sent)


def _options_of(model: nn.Module) -> CallOptions:
    options: CallOptions = own_options(model) if isinstance(model, DataParallel) else state_of(model).options
    return options


def _release(sent: SentBatch) -> None:
    with HostReads() as reads:
        sent.release(reads)


def _chunked(batch: Any, options: CallOptions, slots: int) -> Iterator[tuple[Tensor, list[int] | None]]:
    """Yields the tensors to send, each once, with the chunk sizes into which a call will split them.

    Tensors of one batch may have different sizes if no call gets both. A tensor that cannot be split is not sent: the
    call that gets it raises and says why.
    """
    for tensor in {id(leaf): leaf for _, leaf in leaves(batch, "") if isinstance(leaf, Tensor)}.values():
        if not can_be_sent(tensor) or tensor.is_inference():  # torch does not count writes to inference tensors
            continue
        if is_whole(tensor):
            yield tensor, None
        elif -tensor.dim() <= options.dim < tensor.dim():
            try:
                sizes = options.split.sizes(tensor.shape[options.dim], slots)
            except ValueError:  # numbers of samples that do not fit this tensor: a call with it says so
                continue
            yield tensor, sizes
