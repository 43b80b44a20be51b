"""How the benchmarks shard a model: a unit for each block, and one for what is left, as FSDP2's users do.

Also what a benchmark asks of a sharded model to check it. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from dataparallel.testing.models.resnet import Bottleneck
from gradients import gradients_of
from shapes import BERTLayer, Block

BLOCKS = (Block, Bottleneck, BERTLayer)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The modules that become units of their own."""
    return [child for child in module.modules() if isinstance(child, BLOCKS)]


def sharded(
    module: nn.Module,
    devices: Sequence[torch.device],
    units: Sequence[nn.Module | list[nn.Module]] | None = None,
    reshard_after_forward: bool | int | None = None,
    prefetch: bool = True,
    workers: int | None = None,
    **options: Any,
) -> nn.Module:
    """``module`` itself, changed for good by ``fully_shard``. Its optimizer is to be made afterwards.

    ``units`` are its blocks by default. ``reshard_after_forward`` is for them; the root has its default. Without
    ``prefetch`` no unit is gathered ahead of its use. ``workers``: how many replicas run at a time; the library's
    choice by default. ``options`` go to all calls of ``fully_shard``.
    """
    units = blocks_of(module) if units is None else units
    for unit in units:
        fully_shard(unit, devices=devices, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(module, devices=devices, workers=workers, **options)
    if not prefetch:
        for one in (module, *units):
            one.set_modules_to_forward_prefetch([])
            one.set_modules_to_backward_prefetch([])
    return module


def full(tensor: Tensor) -> Tensor:
    """A parameter or gradient of a sharded model as one tensor on the first device."""
    return tensor.detach().full_tensor()


def full_gradients(module: nn.Module) -> list[Tensor]:
    """Raises `AssertionError` if a parameter has no gradient."""
    return [full(gradient) for gradient in gradients_of(module)]
