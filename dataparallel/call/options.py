"""`CallOptions`: what the calls of one form have in common, and how they split their batches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dataparallel.batches.chunk_sizes import BALANCED, ChunkSizes, FixedSplit
from dataparallel.call.losses import Criterion, ReplicaLoss
from dataparallel.call.parallel_apply import check_workers
from dataparallel.devices import DeviceLike, resolve_output
from dataparallel.replicas.replicate import cap_in_bytes
from dataparallel.threads.balance import BalancedCall, Balancer
from dataparallel.threads.permits import PermitChooser, kind_of_call, size_of


class BatchSplit:
    """How a form splits the batches of its calls: by what the user gave as ``chunk_sizes``, or by a `Balancer`.

    Args:
        given: ints, floats, ``"balanced"`` or ``None``.
        slots: how many there are; 0 if there is no accelerator, and then nothing is split.

    Attributes:
        given: the argument; a sequence as a tuple, so that it is assigned and not changed.
        fixed: what splits every call alike, if calls are not balanced.

    Raises:
        TypeError, ValueError: as `FixedSplit`.
    """

    def __init__(self, given: ChunkSizes, slots: int) -> None:
        self._balancer = Balancer() if isinstance(given, str) and given == BALANCED else None
        self.fixed = FixedSplit(None if self._balancer else given, slots or None)
        self.given: ChunkSizes = BALANCED if self._balancer else self.fixed.given
        self._slots = slots

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchSplit, (self.given, self._slots)

    def sizes(self, total: int, slots: int) -> list[int]:
        """The sizes of the chunks that the next call will have of ``total`` samples; if it is balanced, probably.

        Raises:
            ValueError: the sizes that were given do not fit.
        """
        return self.fixed.sizes(total, slots) if self._balancer is None else self._balancer.next_sizes(total, slots)

    def begin_call(
        self, module: Any, slots: Sequence[torch.device], inputs: Any, kwargs: Any, method: str
    ) -> BalancedCall | None:
        """The split of a call with the arguments of a whole batch; ``None`` if calls are not balanced.

        `end_call` has to follow.
        """
        if self._balancer is None:
            return None
        kind = (method, kind_of_call(module, slots))
        return self._balancer.begin_call(type(module).__name__, kind, size_of(inputs, kwargs), slots)

    def end_call(self, call: BalancedCall | None, failed: bool) -> None:
        """Notes that the call has ended, or failed."""
        if self._balancer is not None and call is not None:
            self._balancer.end_call(call, failed)


@dataclass
class CallOptions:
    """What the calls of one form have in common.

    Attributes:
        slots: where replicas run; none if there is no accelerator, and then the module just runs.
        output_device: of the outputs; ``None`` is the first slot.
        dim: the batch dimension of inputs and outputs.
        split: how the slots share a batch.
        cap_bytes: the largest bucket.
        workers, serial: as for `parallel_apply`.
        loss: what replicas compute of their outputs.
        permits: chooses how many replicas run at a time, and learns from each call.
        overridden: what a user's subclass has in place of the engine's stages, by name.
        may_use_source: one of them may write to parameters: see `call.engine.Call`.
    """

    slots: Sequence[DeviceLike]
    output_device: DeviceLike | None
    dim: int
    split: BatchSplit
    cap_bytes: int
    workers: int | None = None
    serial: bool | None = None
    loss: ReplicaLoss | None = None
    permits: PermitChooser = field(default_factory=PermitChooser)
    overridden: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    may_use_source: bool = False

    @classmethod
    def checked(
        cls,
        modules: Sequence[nn.Module],
        slots: Sequence[torch.device],
        *,
        output_device: DeviceLike | None,
        dim: int,
        chunk_sizes: ChunkSizes,
        bucket_cap_mb: float,
        workers: int | None,
        serial: bool | None,
        loss: Criterion | None,
    ) -> CallOptions:
        """The options that a user gave for ``modules``, which are called as one form.

        Raises:
            TypeError: ``dim`` is no int; ``loss`` cannot be called; ``chunk_sizes`` are no numbers.
            ValueError: ``output_device`` is none; ``workers`` is below 1; ``bucket_cap_mb`` is not above 0;
                ``chunk_sizes`` are not one positive number for each slot; ``forward`` has a parameter with a name that
                ``loss`` needs.
        """
        if slots:
            resolve_output(output_device, slots)
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"dim={dim!r}: the batch dimension is an int")
        check_workers(workers)
        split, cap_bytes = BatchSplit(chunk_sizes, len(slots)), cap_in_bytes(bucket_cap_mb)
        options = cls(slots, output_device, operator.index(dim), split, cap_bytes, workers, serial)
        if loss is not None:
            options.loss, *_ = [ReplicaLoss(loss, module) for module in modules]
        return options
