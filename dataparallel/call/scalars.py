"""The ``scalars=`` option: how scalars that replicas return, such as a loss, become one scalar of the whole batch.

``options`` checks it and ``engine`` passes what `Scalars.of_chunks` returns to the stage ``gather``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from dataparallel.batches.structures import number_of_samples

ScalarRule: TypeAlias = Literal["mean", "sum"] | Callable[[Tensor, tuple[int, ...]], Tensor] | None
"""``"mean"``, ``"sum"``, or a function of the values and of the numbers of samples; ``None``: a vector, as in torch."""


class Scalars:
    """Combines the scalars of a call. Without a rule they become a vector.

    Attributes:
        rule: the function that combines them, or ``None``.

    Raises:
        TypeError, ValueError: ``rule`` is something else than a `ScalarRule`.
    """

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
