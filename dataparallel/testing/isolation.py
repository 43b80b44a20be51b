"""`isolated_slots`: slots on one device behave as separate devices, so tests of several devices run on one.

The library does the work: ``comm`` makes the copies and ``streams.isolated`` orders the streams. This file only
switches it on, for tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dataparallel.comm import settings

__all__ = ["isolated_slots"]


@contextmanager
def isolated_slots() -> Iterator[None]:
    """Inside the block slots on one device share nothing except the device: for tests on a machine that has only one.

    ``DataParallel(model, [0, 0, 0, 0])`` then copies, orders and sums as on four devices:

    - Every slot except the first has its own storage of parameters, of buffers and of its chunk of the batch. Copies
      fill it, in the flat buckets that would go to another device.
    - On an accelerator every slot except the first has its own stream, which is current while its replica runs. The
      stream waits for the caller's earlier work, and the caller's current stream waits for it at the end.
    - Gradients of these slots are flattened, copied, and added in slot order: the results are those of other calls, to
      the bit.
    - ``dataparallel.comm.using(transport="cupy")`` and ``route=...`` work as between devices.

    CPU slots have their own storage and copies, and no streams. Slots on one accelerator still share its random
    generator and its memory, so they run one after the other if they may draw from it. The library orders the memory of
    tensors, containers and registered batches. You keep the memory of other values until the backward has ended.

    Like `dataparallel.comm.using` it holds in this thread, in the library's workers and in the backward of graphs that
    were recorded inside, and it may be nested. It changes nothing for slots on distinct devices. Do not train with it:
    it makes needless copies.

    Example::

        with dataparallel.testing.isolated_slots():
            DataParallel(model, [0, 0, 0, 0])(x).sum().backward()
    """
    with settings.isolating():
        yield
