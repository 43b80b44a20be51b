"""`torch.sim.clocks` and `torch.sim.check_clocks`: the clocks' switches, and the check at the end of a test.

The clocks themselves are in ``csrc``, and `simulate` says what they find.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dataparallel.testing.simulated import extension

__all__ = ["check_clocks", "clocks"]

_lock = threading.Lock()
_open_blocks: list[dict[str, bool]] = []  # the switches that each open block sets, in the order of entry


@contextmanager
def clocks(enabled: bool = True, *, stacks: bool | None = None) -> Iterator[None]:
    """Switches the clocks on or off while inside, for all threads; see `simulate`.

    If blocks are open in several threads, the one that was entered last decides.

    Args:
        enabled: if False, no access raises, and memory that is used inside has gaps in its history.
        stacks: if True, each access keeps its Python stack for the message of a later race, which is slow. ``None``
            changes nothing.
    """
    switches = {"clocks": enabled} if stacks is None else {"clocks": enabled, "stacks": stacks}
    with _lock:
        _open_blocks.append(switches)
        _switch()
    try:
        yield
    finally:
        with _lock:
            _open_blocks[:] = [block for block in _open_blocks if block is not switches]  # another may be equal
            _switch()


def _switch() -> None:
    """Applies the switches of the open blocks. The caller holds the lock."""
    now = {"clocks": True, "stacks": False}
    for switches in _open_blocks:
        now.update(switches)
    extension.C.enable_clocks(now["clocks"])
    extension.C.keep_stacks(now["stacks"])


def check_clocks() -> None:
    """For the end of a test: raises if memory was freed while a stream might still use it.

    Memory is left out if the calling thread has waited for that stream. Without this check the next use of the memory
    raises. The error names the first such memory, and the clocks forget all of it.

    Raises:
        RuntimeError: ``freed too early: ...``, with the memory and both streams.
    """
    extension.C.check()
