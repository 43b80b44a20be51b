"""Layers for tests of sharding, a norm and perceptrons of two layers, and the weights that models for it begin with.

They have the names and sizes that torch's own tests of sharding use. One seed gives the same weights everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def undrawn(layer: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """A layer of torch with memory for its weights, but without values. The arguments are those of its class."""
    # Not torch.nn.utils.skip_init: it makes the layer on meta first, which imports torch's compiler, for seconds.
    silent = type(layer.__name__, (layer,), {"reset_parameters": lambda self: None})
    made = silent(*args, **kwargs)
    made.__class__ = layer
    return made


def draw_weights(module: nn.Module, seed: int) -> None:
    """Gives each linear, embedding and layer norm in the module the first values of this seed.

    A weight that is used twice gets the values of its first use. On the device ``meta`` nothing is drawn.
    """
    if all(parameter.is_meta for parameter in module.parameters()):
        return
    generator = torch.Generator(device="cpu").manual_seed(seed)
    done: set[int] = set()
    for layer in module.modules():
        for parameter, values in _first_values(layer, generator):
            if id(parameter) not in done:
                fill(parameter, values)
                done.add(id(parameter))


def fill(parameter: Tensor, values: Tensor) -> None:
    """Writes values that are whole and on the CPU into a parameter on any device, divided or not.

    Each process writes its own part of a DTensor. Nothing is sent.
    """
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        mesh = parameter.device_mesh
        on_device = values.to(mesh.device_type, parameter.dtype)
        values = distribute_tensor(on_device, mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]
    with torch.no_grad():
        parameter.copy_(values)


def _first_values(layer: nn.Module, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(layer, nn.Linear):
        bound = layer.in_features**-0.5
        for parameter in layer.parameters(recurse=False):
            yield parameter, _empty(parameter).uniform_(-bound, bound, generator=generator)
    elif isinstance(layer, nn.Embedding):
        yield layer.weight, _empty(layer.weight).normal_(generator=generator)
    elif isinstance(layer, nn.LayerNorm):
        yield layer.weight, _empty(layer.weight).fill_(1)
        yield layer.bias, _empty(layer.bias).zero_()


def _empty(like: Tensor) -> Tensor:
    # The numbers that a generator gives depend on the dtype, so all are drawn in one.
    return torch.empty(like.shape, dtype=torch.float64, device="cpu")


class RMSNorm(nn.Module):
    """Divides by the root of the mean square of the last dimension, then multiplies by a weight.

    It is made of plain operators, for tests in which each of them meets a sharded tensor. `torch.nn.RMSNorm` is one
    operator. Source of the formula: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.

    Args:
        dim: the size of the last dimension. ``weight`` has this size and begins as ones.
        eps: is added to the mean square.
        device: of the weight; None is the default device.
        dtype: of the weight; None is the default dtype.
    """

    def __init__(self, dim: int, eps: float = 1e-6, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Makes the weight ones again."""
        fill(self.weight, torch.ones(self.weight.shape, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of ``x``, whose last dimension is ``dim``."""
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.eps) * self.weight


class MLP(nn.Module):
    """Two linear layers, 10 to 16 and 16 to 10 features, with a ReLU between them: ``net1``, ``relu``, ``net2``.

    Args:
        device: of the weights; None is the default device. On ``"meta"`` no weights are drawn.
        bias: the linear layers have biases.
        seed: the same seed gives the same weights, on each device and in each process.
    """

    def __init__(self, device: Any = None, bias: bool = True, *, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.net1 = undrawn(nn.Linear, 10, 16, bias=bias, device=device)
        self.relu = nn.ReLU()
        self.net2 = undrawn(nn.Linear, 16, 10, bias=bias, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives the weights their first values again. Made on ``"meta"``, it gets them here, after ``to_empty``."""
        draw_weights(self, self.seed)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of ``x``, whose last dimension is 10."""
        hidden: Tensor = self.relu(self.net1(x))
        out: Tensor = self.net2(hidden)
        return out


class StackedMLP(nn.Module):
    """Several `MLP` one after the other: ``layers[i]``.

    Layer i is drawn from the seed ``seed + i``, so that a test sees if layers change places.

    Args:
        device: of the weights; None is the default device. On ``"meta"`` no weights are drawn.
        layers: how many.
        seed: the same seed gives the same weights, on each device and in each process.
    """

    def __init__(self, device: Any = None, layers: int = 2, *, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(device, seed=seed + i) for i in range(layers))

    def reset_parameters(self) -> None:
        """Gives the weights of all layers their first values again."""
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of ``x``, whose last dimension is 10."""
        for layer in self.layers:
            x = layer(x)
        return x
