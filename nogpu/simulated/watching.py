"""`torch.sim.clocks`, `torch.sim.check_clocks`, `torch.sim.counted` and `torch.sim.timeline`: what tests ask for.

The clocks and counts themselves are in ``csrc``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from nogpu.shared import Counts, Switches, counting
from nogpu.simulated import extension
from nogpu.simulated.extension import index_of
from nogpu.timeline.recording import Timeline, record

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


def timeline(limit: int = 1_000_000, stacks: bool = False) -> AbstractContextManager[Timeline]:
    """Records every launch on simulated devices while inside, of all threads of the process.

    A launch is what `torch.sim.counted` counts, and is recorded when its operator has succeeded. Launches of other
    threads are recorded once these threads are known to be done: after a join, or after ``backward()`` has returned.
    Nothing of what the program computes changes, and the clocks may be on or off.

    Recorded are what each launch reads, writes and moves, and what orders it: its stream, the streams and events that
    this stream has waited for, what its host thread has waited for (``synchronize``, ``item``, blocking copies), and
    threads that were started or joined. A query (``event.query``) is no wait. Not recorded are what a thread learns
    through locks and queues (the clocks do not know it either), what torch.distributed moves, and what an operator
    takes from a CPU tensor by itself. Bytes are
    elements times item size, for every tensor that an operator reads or writes, without caches. FLOPs are those of
    ``torch.utils.flop_counter``: 0 for operators without a formula. A thread's first launch has 0 seconds of host time,
    unless the thread opened the block or started inside.

    A forked child records nothing until it opens a block of its own.

    A training step takes 1.05 to 1.15 times as long while it is recorded, and a program of the smallest operators up to
    1.7 times. Each launch takes about 1.5 kB of host memory.

    Args:
        limit: the largest number of launches. Operators that turn out to be no launch (see `torch.sim.counted`) may
            count too.
        stacks: if True, each launch keeps its Python stack, which is slow. Threads of a backward have none.

    Yields:
        A `Timeline`. After the block its ``recording`` has the launches.

    Raises:
        TypeError: if ``limit`` is not an int.
        ValueError: if ``limit`` is less than 1.
        RuntimeError: on entry, if another block is open, in any thread; at the end, if there were more launches than
            ``limit``.
    """
    return record(extension.C, "torch.sim.timeline", limit, stacks)
