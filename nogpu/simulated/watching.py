"""`torch.sim.clocks`, `torch.sim.check_clocks` and `torch.sim.counted`: what tests ask of the devices.

The clocks and counts themselves are in ``csrc``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from nogpu.shared import Counts, Switches, counting
from nogpu.simulated import extension
from nogpu.simulated.extension import index_of

_switches = Switches(lambda: extension.C)


def clocks(enabled: bool = True, *, stacks: bool | None = None) -> AbstractContextManager[None]:
    """Switches the clocks on or off while inside, for all threads; see `simulate`.

    If blocks are open in several threads, the one that was entered last decides.

    Args:
        enabled: if False, no access raises, and memory that is used inside has gaps in its history.
        stacks: if True, each access keeps its Python stack for the message of a later race, which is slow. ``None``
            changes nothing.
    """
    return _switches.set(enabled, stacks)


def check_clocks() -> None:
    """For the end of a test: raises if memory was freed while a stream might still use it.

    Memory is left out if the calling thread has waited for that stream. Without this check the next use of the memory
    raises. The error names the first such memory, and the clocks forget all of it.

    Raises:
        RuntimeError: ``freed too early: ...``, with the memory and both streams.
    """
    extension.C.check()


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
