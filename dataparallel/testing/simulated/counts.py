"""`torch.sim.counted`: launches, and bytes copied between devices, for tests of what a program asks of the devices.

The extension counts all the time, for the whole process, and ``csrc`` decides what a launch is. The readings are those
of ``dataparallel.testing.counts``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dataparallel.testing.counts import HOST, Counts, counting
from dataparallel.testing.simulated import extension
from dataparallel.testing.simulated.extension import index_of

__all__ = ["HOST", "Counts", "counted"]


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts launches and copied bytes of the whole process, all threads, while inside.

    Blocks may be nested, and several threads may be inside: each block counts everything that happens.

    A launch is an operator that reads or writes elements on a device and does not raise. The number of its tensors does
    not matter: ``cat`` is one launch, and so are the ``torch._foreach_*`` operators for lists on one device, because
    CUDA has fused kernels for them. Lists on several devices are launched one tensor at a time. Where torch itself
    calls several operators, each counts: ``clone`` is a copy, ``ones`` a fill, dropout and recurrent cells are several.

    A copy is one launch, whatever the layouts and dtypes. It counts on the device on whose stream it is launched: the
    source if that is a device, otherwise the target. ``item`` is one launch, and so is a ``resize_`` that moves
    elements to more memory. Allocations, views, operators that only read or change a shape, and operators on tensors
    without elements are no launches.

    The bytes of a copy are those of its target (elements times item size), because torch converts and packs before it
    sends; ``item`` copies one element. Two things do not count: what an operator takes from a CPU tensor by itself
    (numbers, indices), and what torch.distributed moves.

    Yields:
        ``counts.launches``: a list with a number for each device. ``counts.copied``: for each pair ``(from, to)`` of
        devices the bytes that were copied, 0 if there were none; -1 is the host. ``counts.sent(device)`` and
        ``counts.received(device)``: the bytes to and from all other devices, without the host. Inside the block they
        are the counts so far; after it they stay.
    """
    with counting(Counts(extension.C, extension.C.device_count(), index_of)) as counts:
        yield counts
