"""`CallOptions` holds the options of a form, which all its calls share.

`ScalarRule` is ``scalars=``: how scalars that replicas return, such as a loss, become one scalar of the whole batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from dataparallel.batches.chunk_sizes import ChunkSizes, Split
from dataparallel.batches.gather import Pad, checked_pad
from dataparallel.batches.structures import number_of_samples
from dataparallel.call.advice import PerformanceChecks
from dataparallel.call.parallel_apply import check_workers
from dataparallel.devices import DeviceLike, resolve_output, resolve_slots
from dataparallel.replicas.replicate import cap_in_bytes
from dataparallel.threads.permits import Permits

ScalarRule: TypeAlias = Literal["mean", "sum"] | Callable[[Tensor, tuple[int, ...]], Tensor] | None
"""``"mean"``, ``"sum"``, or a function of the values and of the numbers of samples; ``None``: a vector, as in torch."""


class Scalars:
    """Combines the scalars of a call by ``rule``. Without a rule they become a vector."""

    def __init__(self, rule: ScalarRule = None) -> None:
        if isinstance(rule, str) and rule not in _RULES:
            raise ValueError(f"scalars={rule!r}: expected 'mean', 'sum', a function, or None for a vector")
        if rule is not None and not callable(rule) and not isinstance(rule, str):
            raise TypeError(f"scalars={rule!r}: expected 'mean', 'sum', a function, or None for a vector")
        self.rule = _RULES[rule] if isinstance(rule, str) else rule

    def of_chunks(self, inputs: Sequence[Any], kwargs: Sequence[Any], dim: int) -> Callable[[Tensor], Tensor] | None:
        """Returns a function of a vector with one value for each replica, for chunks with these arguments."""
        if self.rule is None:
            return None
        samples = tuple(number_of_samples(chunk, dim) for chunk in zip(inputs, kwargs, strict=True))
        rule = self.rule
        return lambda values: rule(values, samples)


def _mean(values: Tensor, samples: tuple[int, ...]) -> Tensor:
    """Weights each value with its number of samples: the mean over the batch of a mean over each chunk."""
    if not (values.is_floating_point() or values.is_complex()):
        values = values.to(torch.get_default_dtype())
    total = sum(samples)
    if len({*samples}) == 1 or total == 0:
        return values.mean()
    shares = [value * (count / total) for value, count in zip(values.unbind(), samples, strict=True)]
    return torch.stack(shares).sum()


def _sum(values: Tensor, samples: tuple[int, ...]) -> Tensor:
    return values.sum()


_RULES: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {"mean": _mean, "sum": _sum}


class CallOptions:
    """The options of a form, which all its calls share. The user reads them, and assigns some of them between calls.

    An option is checked when it is assigned. If it is refused, nothing changes.

    Attributes:
        output_device: the device of the outputs; ``None`` is the first slot.
        chunk_sizes, workers, serial, bucket_cap_mb, scalars, pad: as given; a sequence is a tuple here.
        permits: says how many replicas run at a time, and learns from the first calls.
        overridden: by name the stages that a user's subclass overrides.
        hands_back: true if the caller gets what replicas write into dicts and lists: see ``batches.structures``.
        may_use_source: true if an overridden stage may write to parameters: see `call.engine.Call`.
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
    split: Split
    cap_bytes: int
    combines: Scalars
    permits: Permits
    checks: PerformanceChecks
    overridden: Mapping[str, Callable[..., Any]]
    may_use_source: bool
    hands_back: bool

    def __init__(self, slots: Sequence[DeviceLike], **others: Any) -> None:
        vars(self).update(slots=slots, permits=Permits(), checks=PerformanceChecks())
        vars(self).update(overridden={}, may_use_source=False, hands_back=True)
        for name, value in others.items():
            vars(self).update(self._checked(name, value))

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
            split = Split(value, len(self.slots) or None)
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
