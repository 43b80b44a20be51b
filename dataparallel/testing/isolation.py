"""`isolated_slots`: slots on one device behave as devices of their own, so that one device shows what several would.

The library does the work: ``comm`` copies and ``streams.isolated`` orders. This file only switches it on, for tests;
nothing in the library asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dataparallel.comm import settings

__all__ = ["isolated_slots"]


@contextmanager
def isolated_slots() -> Iterator[None]:
    """Inside, slots on one device share nothing but that device: for tests on a machine that has a single one.

    ``DataParallel(model, [0, 0, 0, 0])`` then copies, orders and sums as it would on four devices:

    - Every slot but the first has storage of its own: of parameters, of buffers and of its chunk of the batch. It is
      filled by copies, in the flat buckets that would go to another device.
    - On an accelerator every slot but the first on it has a stream of its own, current while its replica runs. The
      stream waits for what the caller has launched before, and the caller's current stream waits for it at the end.
    - Gradients of such slots are flattened, copied, and added in slot order: the numbers are those of other calls, to
      the bit.
    - ``dataparallel.comm.using(transport="cupy")`` and ``route=...`` mean what they mean between devices.

    CPU slots have their own storage and copies, and no streams. Slots on one accelerator still share its random
    generator and its memory, so they run one after the other where they may draw from it. Memory of values that
    are no tensors, containers or registered batches must outlive a backward by other means.

    It holds in this thread, in the library's workers and in the backward of what was recorded inside, like
    `dataparallel.comm.using`, and may be nested. Slots on distinct devices notice nothing. Never in a training: it
    copies what need not be copied.

    Example::

        with dataparallel.testing.isolated_slots():
            DataParallel(model, [0, 0, 0, 0])(x).sum().backward()
    """
    with settings.isolating():
        yield
