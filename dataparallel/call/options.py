"""`CallOptions` holds the options of a form, which all its calls share. `BatchSplit` splits the batches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from dataparallel.batches.chunk_sizes import BALANCED, ChunkSizes, FixedSplit
from dataparallel.batches.padding import Pad, checked_pad
from dataparallel.call.advice import PerformanceChecks
from dataparallel.call.losses import Criterion, ReplicaLoss
from dataparallel.call.parallel_apply import check_workers
from dataparallel.call.scalars import ScalarRule, Scalars
from dataparallel.devices import DeviceLike, resolve_output, resolve_slots
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


class CallOptions:
    """The options of a form, which all its calls share. The user reads them, and assigns some of them between calls.

    An option is checked when it is assigned. If it is refused, nothing changes.

    Args:
        modules: they are called as one form.
        slots: the slots. Without accelerator there are none, and the module runs without replicas.
        loss: the criterion from which replicas compute a loss, if any.
        others: as the arguments of `dataparallel.DataParallel`.

    Attributes:
        slots, loss: as given.
        output_device: the device of the outputs; ``None`` is the first slot.
        dim: the batch dimension of inputs and outputs.
        chunk_sizes, workers, serial, bucket_cap_mb, scalars, pad: as given; a sequence is a tuple here.
        split: splits a batch among the slots.
        cap_bytes: the size of the largest bucket.
        replica_loss: computes ``loss`` in the replicas.
        combines: combines scalars that replicas return.
        permits: chooses how many replicas run at a time, and learns from each call.
        checks: looks at the first calls, and warns of what makes them slow.
        overridden: by name the stages that a user's subclass overrides.
        hands_back: true if the caller gets what replicas write into dicts and lists: see ``batches.written``.
        may_use_source: true if an overridden stage may write to parameters: see `call.engine.Call`.

    Raises:
        AttributeError: what is assigned is no option, or one that stays.
        TypeError: ``dim`` is no int; ``loss`` or ``scalars`` cannot be called; ``chunk_sizes`` or ``pad`` are no
            numbers; ``workers`` is no int; ``serial`` is no bool.
        ValueError: ``output_device`` is no device; ``workers`` is below 1; ``bucket_cap_mb`` is not above 0;
            ``chunk_sizes`` are not one positive number for each slot; ``forward`` has a parameter with a name that
            ``loss`` needs; ``scalars`` is another string than ``"mean"`` and ``"sum"``.
    """

    assignable: ClassVar[tuple[str, ...]] = (
        "chunk_sizes", "workers", "serial", "scalars", "pad", "output_device", "dim"
    )  # fmt: skip

    slots: Sequence[DeviceLike]
    output_device: DeviceLike | None
    dim: int
    chunk_sizes: ChunkSizes
    workers: int | None
    serial: bool | None
    bucket_cap_mb: float
    scalars: ScalarRule
    pad: Pad
    loss: Criterion | None
    split: BatchSplit
    cap_bytes: int
    replica_loss: ReplicaLoss | None
    combines: Scalars
    permits: PermitChooser
    checks: PerformanceChecks
    overridden: Mapping[str, Callable[..., Any]]
    may_use_source: bool
    hands_back: bool

    def __init__(
        self, modules: Sequence[nn.Module], slots: Sequence[DeviceLike], *, loss: Criterion | None = None, **others: Any
    ) -> None:
        vars(self).update(slots=slots, permits=PermitChooser(), checks=PerformanceChecks())
        vars(self).update(overridden={}, may_use_source=False, hands_back=True, loss=loss, replica_loss=None)
        for name, value in others.items():
            vars(self).update(self._checked(name, value))
        if loss is not None:
            vars(self)["replica_loss"], *_ = [ReplicaLoss(loss, module) for module in modules]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.assignable:
            raise AttributeError(
                f"options.{name} cannot be assigned. Between calls one may assign {', '.join(self.assignable)}; pass "
                "other options where you give the module its form"
            )
        vars(self).update(self._checked(name, value))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.assignable)})"

    def _checked(self, name: str, value: Any) -> dict[str, Any]:
        """Returns the option, and what calls make of it."""
        if name == "chunk_sizes":
            split = BatchSplit(value, len(self.slots))
            return {name: split.given, "split": split}
        if name == "bucket_cap_mb":
            return {name: value, "cap_bytes": cap_in_bytes(value)}
        if name == "scalars":
            return {name: value, "combines": Scalars(value)}
        if name == "pad":
            return {name: checked_pad(value)}
        if name == "workers":
            check_workers(value)
        elif name == "output_device" and self.slots:
            resolve_output(value, resolve_slots(self.slots))
        elif name == "dim":
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"dim={value!r}: the batch dimension is an int")
            value = operator.index(value)
        elif name == "serial" and not (value is None or isinstance(value, bool)):
            raise TypeError(f"serial={value!r}: expected True, False, or None for what the environment says")
        return {name: value}
