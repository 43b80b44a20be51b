"""`checkpoint`: recomputation in backward for functions that call collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch.utils import checkpoint as torch_checkpoint

from dataparallel import _torch
from dataparallel.peers.tape import Tape

__all__ = ["checkpoint"]

T = TypeVar("T")


@_torch.not_traced
def checkpoint(
    function: Callable[..., T],
    *args: Any,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    **kwargs: Any,
) -> T:
    """``function(*args, **kwargs)``, whose activations are computed again in backward in place of being kept.

    It is ``torch.utils.checkpoint.checkpoint`` without reentrance, for functions that call collectives of
    ``dataparallel.peers``. What these returned is kept, and the recomputation gets it again, so that it meets nobody.
    It has the index and the count of the replica whose forward it repeats. Without collectives, and outside of a
    parallel forward, it is torch's checkpoint.

    Args:
        function: computes the same when it is called again.
        args, kwargs: its arguments.
        preserve_rng_state, determinism_check: as in torch.

    Raises:
        RuntimeError: the recomputation calls other collectives than the forward; what torch's checkpoint raises.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        tape = Tape()
        return tape.recorded(), _Replayed(tape)

    return torch_checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        **kwargs,
    )


class _Replayed:
    """The context of recomputations. torch enters it once for each of them."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._tape.replayed()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
