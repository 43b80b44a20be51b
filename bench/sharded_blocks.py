"""How the benchmarks shard a model: a unit for each block, and one for what is left, as FSDP2's users do.

Also what a benchmark asks of a sharded model to check it. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from shapes import BERTLayer, Block, Bottleneck, ResNet50

BLOCKS = (Block, Bottleneck, BERTLayer)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The modules that become units of their own."""
    return [child for child in module.modules() if isinstance(child, BLOCKS)]


def large_units_of(module: nn.Module) -> list[nn.Module | list[nn.Module]]:
    """Four larger units instead: the stages of a ResNet, or a quarter of the blocks each."""
    if isinstance(module, ResNet50):
        return [stage for stage in module if isinstance(stage, nn.Sequential)]
    blocks = blocks_of(module)
    quarter = len(blocks) // 4
    return [blocks[first : first + quarter] for first in range(0, len(blocks), quarter)]


def sharded(
    module: nn.Module,
    devices: Sequence[torch.device | str],
    reshard_after_forward: bool | int | None = None,
    prefetch: bool = True,
    workers: int | None = None,
    graphs: bool = False,
) -> nn.Module:
    """``module`` itself, changed for good by ``fully_shard``. Its optimizer is to be made afterwards.

    ``reshard_after_forward`` is for the blocks; the root has its default. Without ``prefetch`` no unit is gathered
    ahead of its use. ``workers``: how many replicas run at a time; measured by default. ``graphs``: units are captured.
    """
    blocks = blocks_of(module)
    for block in blocks:
        fully_shard(block, devices=devices, reshard_after_forward=reshard_after_forward)
    fully_shard(module, devices=devices, workers=workers, graphs=graphs)
    if not prefetch:
        for unit in (module, *blocks):
            unit.set_modules_to_forward_prefetch([])
            unit.set_modules_to_backward_prefetch([])
    return module


def full(tensor: Tensor) -> Tensor:
    """A parameter or gradient of a sharded model as one tensor on the first device."""
    return tensor.detach().full_tensor()


def full_gradients(module: nn.Module) -> list[Tensor]:
    """Raises `AssertionError` if a parameter has no gradient."""
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [full(gradient) for gradient in gradients]


def state_of(module: nn.Module) -> Any:
    """What the library keeps for a sharded model: for benchmarks that set what has no option."""
    return fully_shard.state(module)
