"""What a replica asks of the others: the `Request` that all of them have to bring alike.

``collectives`` makes one for each call. `Request.__str__` stands in error messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Described", "Request", "described"]


@dataclass(frozen=True)
class Described:
    """What has to agree of a tensor. A size is ``None`` where it may differ between replicas."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True)
class Request:
    """One collective.

    Attributes:
        name: the function's name.
        detail: its other arguments, as they are written.
        tensors: what has to agree of each tensor.
        across_machines: true if the replicas of other machines take part.
        inference: true if it is called in inference mode, which all replicas have to be in, or none.
    """

    name: str
    detail: str = ""
    tensors: tuple[Described, ...] = ()
    inference: bool = False
    across_machines: bool = False

    def __str__(self) -> str:
        of = f" of {', '.join(map(str, self.tensors))}" if self.tensors else ""
        where = " across machines" if self.across_machines else ""
        return f"{self.name}({self.detail}){of}{where}{' in inference mode' if self.inference else ''}"


def described(tensors: Sequence[Tensor], free_dim: int | None = None) -> tuple[Described, ...]:
    """What has to agree of each of ``tensors``; sizes along ``free_dim`` may differ."""
    found = []
    for tensor in tensors:
        shape: list[int | None] = [*tensor.shape]
        if free_dim is not None:
            shape[free_dim] = None
        found.append(Described(tensor.dtype, tuple(shape)))
    return tuple(found)
