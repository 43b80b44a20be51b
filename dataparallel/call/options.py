"""`CallOptions` holds the options of a form, which all its calls share. `BatchSplit` splits the batches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dataparallel.batches.chunk_sizes import BALANCED, ChunkSizes, FixedSplit
from dataparallel.batches.padding import Pad, checked_pad
from dataparallel.call.losses import Criterion, ReplicaLoss
from dataparallel.call.parallel_apply import check_workers
from dataparallel.call.performance_warnings import PerformanceChecks
from dataparallel.call.scalars import ScalarRule, Scalars
from dataparallel.devices import DeviceLike, resolve_output
from dataparallel.replicas.replicate import cap_in_bytes
from dataparallel.threads.balance import BalancedCall, Balancer
from dataparallel.threads.permits import PermitChooser, kind_of_call, size_of


class BatchSplit:
    """Splits the batches of a form's calls: by the user's ``chunk_sizes``, or by a `Balancer`.

    Args:
        given: the user's ``chunk_sizes``: ints, floats, ``"balanced"`` or ``None``.
        slots: the number of slots; 0 if there is no accelerator, and then nothing is split.

    Attributes:
        given: the argument; a sequence is kept as a tuple, so that users assign it and cannot change it in place.
        fixed: splits every call alike, if calls are not balanced.

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
        """Returns the chunk sizes of the next call for ``total`` samples. With a `Balancer` they may still change.

        Raises:
            ValueError: the given sizes do not fit.
        """
        return self.fixed.sizes(total, slots) if self._balancer is None else self._balancer.next_sizes(total, slots)

    def begin_call(
        self, module: Any, slots: Sequence[torch.device], inputs: Any, kwargs: Any, method: str
    ) -> BalancedCall | None:
        """Returns the split of a call; ``None`` if calls are not balanced. ``inputs`` and ``kwargs``: the whole batch.

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
    """The options of one form, which all its calls share.

    Attributes:
        slots: the slots. Without accelerator there are none, and the module runs without replicas.
        output_device: the device of the outputs; ``None`` is the first slot.
        dim: the batch dimension of inputs and outputs.
        split: splits a batch among the slots.
        cap_bytes: the size of the largest bucket.
        workers, serial: as for `parallel_apply`.
        loss: the loss that replicas compute from their outputs, if any.
        scalars: combines scalars that replicas return.
        pad: fills outputs up to one size; a method may have its own.
        permits: chooses how many replicas run at a time, and learns from each call.
        checks: looks at the first calls, and warns of what makes them slow.
        overridden: by name the stages that a user's subclass overrides.
        hands_back: true if the caller gets what replicas write into dicts and lists: see ``batches.written``.
        may_use_source: true if an overridden stage may write to parameters: see `call.engine.Call`.
    """

    slots: Sequence[DeviceLike]
    output_device: DeviceLike | None
    dim: int
    split: BatchSplit
    cap_bytes: int
    workers: int | None = None
    serial: bool | None = None
    loss: ReplicaLoss | None = None
    scalars: Scalars = field(default_factory=Scalars)
    pad: Pad = None
    permits: PermitChooser = field(default_factory=PermitChooser)
    checks: PerformanceChecks = field(default_factory=PerformanceChecks)
    overridden: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    may_use_source: bool = False
    hands_back: bool = True

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
        scalars: ScalarRule,
        pad: Pad,
    ) -> CallOptions:
        """Checks a user's options for ``modules``, which are called as one form, and returns them.

        Raises:
            TypeError: ``dim`` is no int; ``loss`` or ``scalars`` cannot be called; ``chunk_sizes`` or ``pad`` are no
                numbers.
            ValueError: ``output_device`` is no device; ``workers`` is below 1; ``bucket_cap_mb`` is not above 0;
                ``chunk_sizes`` are not one positive number for each slot; ``forward`` has a parameter with a name that
                ``loss`` needs; ``scalars`` is another string than ``"mean"`` and ``"sum"``.
        """
        if slots:
            resolve_output(output_device, slots)
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"dim={dim!r}: the batch dimension is an int")
        check_workers(workers)
        split, cap_bytes = BatchSplit(chunk_sizes, len(slots)), cap_in_bytes(bucket_cap_mb)
        options = cls(slots, output_device, operator.index(dim), split, cap_bytes, workers, serial)
        options.scalars, options.pad = Scalars(scalars), checked_pad(pad)
        if loss is not None:
            options.loss, *_ = [ReplicaLoss(loss, module) for module in modules]
        return options
