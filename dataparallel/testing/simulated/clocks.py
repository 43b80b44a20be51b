"""`torch.sim.clocks` and `torch.sim.check_clocks`: the clocks' switches, and the check at the end of a test.

The clocks themselves are in ``csrc``, and `simulate` says what they find.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from dataparallel.testing.clocks import Switches
from dataparallel.testing.simulated import extension

__all__ = ["check_clocks", "clocks"]

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
