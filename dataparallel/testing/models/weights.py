"""The first weights of the models for sharding, drawn from a generator of their own.

torch draws first weights from the generator that the whole process shares. Threads that build models at the same time
get parts of one sequence there, and what a process drew before counts. Here each seed has a generator on the CPU: every
slot, thread and process gets the same numbers, on every device, and in every dtype up to its rounding.

The distributions are those of torch's layers. `layers` and `transformer` call this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["draw_weights", "fill", "undrawn"]


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
