"""The parts of the test models: a case, seeded builders, batches, optimizers.

This file has no models. A test that needs another model or batch makes it with these parts, so
that it is seeded like the others.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[tuple[Any, ...], dict[str, Any]]
Build = Callable[[], nn.Module]
MakeBatch = Callable[[int, int], Batch]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """AdamW: its weight decay moves a parameter whose gradient is zeros, but not one without a gradient."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """SGD: it takes sparse and dense gradients in one list of parameters."""
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Case:
    """A model and its batches.

    `batch(size, seed)` returns positional and keyword arguments with `size` samples along `dim`,
    on the CPU. `by_chunks` is true if samples of one chunk influence each other; the reference
    then runs chunk by chunk. `twin` builds the same weights without checkpointing, for a model
    that draws random numbers: only its twin, on the same slots and with the same seed, computes
    the same.
    """

    name: str
    build: Build
    batch: MakeBatch
    dim: int = 0
    by_chunks: bool = False
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = adamw
    twin: Build | None = None


def seeded(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Build:
    """A builder that calls `make` with a fixed seed, in float64. The global generator stays as it is."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # torch.jit and the older weight_norm warn that they are deprecated.
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            return make(*args, **kwargs).double()

    return build


def numbers(*shape: int) -> MakeBatch:
    """Batches of one float64 tensor of normal numbers, `shape` for each sample."""

    def batch(size: int, seed: int) -> Batch:
        x = torch.randn(size, *shape, dtype=torch.float64, generator=generator(seed))
        return (x,), {}

    return batch


def tokens(length: int, vocabulary: int) -> MakeBatch:
    """Batches of one integer tensor of `length` tokens a sample."""

    def batch(size: int, seed: int) -> Batch:
        return (torch.randint(vocabulary, (size, length), generator=generator(seed)),), {}

    return batch


def generator(seed: int) -> torch.Generator:
    """A new CPU generator with this seed."""
    return torch.Generator().manual_seed(seed)
