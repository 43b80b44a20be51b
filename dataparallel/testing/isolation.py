"""`isolated_slots`: slots on one device behave as slots on several devices would, for tests on a single device.

The library does the work: ``comm`` copies, and ``streams.isolated`` orders streams. ``kept``, ``autograd``,
``composable`` and other files of ``streams`` ask for the setting too. This file only switches it on. Tests call it;
nothing in the library does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dataparallel.comm import settings

__all__ = ["isolated_slots"]


@contextmanager
def isolated_slots() -> Iterator[None]:
    """Inside, slots on one device share neither storage nor streams, for tests on a machine with a single device.

    ``DataParallel(model, [0, 0, 0, 0])`` then copies, orders and sums as it would on four devices:

    - Every slot but the first has its own storage for parameters, buffers and its chunk of the batch. Copies fill it,
      in the same flat buckets that would go to another device.
    - On an accelerator, every slot but the first on a device has its own stream, which is current while the replica
      runs. It waits for what the caller has launched before, and the caller's current stream waits for it at the end.
    - Gradients of these slots are flattened, copied, and added in slot order. They have the same bits as
      without isolation.
    - ``dataparallel.comm.using(transport="cupy")`` and ``route=...`` mean the same as between devices.

    CPU slots have no streams. Slots on one accelerator still share its memory and its random generator, so replicas
    that may draw from it run one after the other. Only memory in tensors, modules, containers and registered batches is
    protected. Memory in other objects may be reused before the backward has read it.

    It holds in this thread, in the library's workers, and in the backward of what is recorded inside, like
    `dataparallel.comm.using`. Blocks may be nested. Slots on distinct devices do not change. It is not for training,
    because it copies what need not be copied.

    Example::

        with dataparallel.testing.isolated_slots():
            DataParallel(model, [0, 0, 0, 0])(x).sum().backward()
    """
    with settings.isolating():
        yield
