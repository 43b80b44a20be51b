"""`at_end_of_pass`: runs a function when the running pass of backward ends, also if it fails.

torch's engine calls back only when a pass succeeds. It drops its callbacks when a pass has failed and all its threads
have left it, and that is noticed here. Who collects something for a whole pass calls this from inside of it.
"""

from __future__ import annotations

from collections.abc import Callable

from dataparallel import _torch

__all__ = ["at_end_of_pass"]


def at_end_of_pass(finish: Callable[[BaseException | None], object]) -> None:
    """Calls ``finish(None)`` when the pass succeeds; what it raises is an error of the pass.

    If the pass fails, calls ``finish(error)``. The error only says so, because the engine raises the pass's own one
    elsewhere.
    """
    _torch.queue_callback(_EndOfPass(finish))


class _EndOfPass:
    """What the engine calls or drops. It lets go of the function, which may hold much, as soon as that is called."""

    def __init__(self, finish: Callable[[BaseException | None], object]) -> None:
        self._finish: Callable[[BaseException | None], object] | None = finish

    def __call__(self) -> None:
        self._end(None)

    def __del__(self) -> None:
        if self._finish is not None:
            self._end(RuntimeError("a backward has failed; it raised its own error"))

    def _end(self, error: BaseException | None) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish(error)
