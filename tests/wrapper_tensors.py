"""Tensors that consist of other tensors, as quantised weights do, and what hangs on a parameter beside its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class Quantised(Tensor):
    """Whole numbers and a scale, in attributes. Operators compute with their product, and give plain tensors."""

    numbers: Tensor
    scale: Tensor
    # Operators that give tensors of this class: they are applied to both inner tensors.
    KEEPS = (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.alias.default)

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Quantised:
        made = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float64, device=numbers.device)
        made.numbers, made.scale = numbers, scale
        return made

    @classmethod
    def of(cls, values: Tensor) -> Any:
        """With one scale for each row."""
        scale = values.detach().abs().amax(1, keepdim=True) / 100
        return cls(torch.round(values.detach() / scale).to(torch.int8), scale)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}{tuple(self.shape)}"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict, context: None, size: Any, stride: Any) -> Quantised:
        return cls(inner["numbers"], inner["scale"])

    def plain(self) -> Tensor:
        scale = self.scale.plain() if isinstance(self.scale, Quantised) else self.scale
        return self.numbers * scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in cls.KEEPS:
            kwargs = {name: each for name, each in (kwargs or {}).items() if name != "dtype"}
            return cls(*(function(each, *args[1:], **kwargs) for each in (args[0].numbers, args[0].scale)))
        args, kwargs = pytree.tree_map_only(Quantised, Quantised.plain, (args, kwargs or {}))
        return function(*args, **kwargs)


class InSlots(Quantised):
    """The same, with the inner tensors in ``__slots__`` of the class."""

    __slots__ = ("numbers", "scale")


class Twice(Quantised):
    """The scale is quantised itself."""

    @classmethod
    def of(cls, values: Tensor) -> Any:
        once = Quantised.of(values)
        return cls(once.numbers, Quantised.of(once.scale))


class Batch(Quantised):
    """Can be cut and joined along its rows, so it can be an input and an output."""

    KEEPS = (*Quantised.KEEPS, aten.split_with_sizes.default, aten.cat.default)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is aten.split_with_sizes.default:
            return [*map(cls, *(function(each, *args[1:]) for each in (args[0].numbers, args[0].scale)))]
        if function is aten.cat.default:
            return cls(
                *(function([getattr(each, name) for each in args[0]], *args[1:]) for name in ("numbers", "scale"))
            )
        return super().__torch_dispatch__(function, types, args, kwargs)


class Forgetful(Quantised):
    """Becomes a plain tensor when it is copied."""

    KEEPS = (aten.detach.default, aten.alias.default)


WRAPPERS = (Quantised, InSlots, Twice)


class QuantState:
    """What belongs to a quantised weight. As in bitsandbytes, ``to`` moves the object itself and returns nothing."""

    def __init__(self, scale: Tensor, inner: QuantState | None = None) -> None:
        self.scale, self.inner, self.kind = scale, inner, "int8"

    def to(self, device: torch.device) -> None:
        raise AssertionError("this would move the state of the source")


class Packed(nn.Module):
    """A linear layer of whole numbers, whose scale hangs on the weight."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        quantised = Quantised.of(values)
        self.weight = nn.Parameter(quantised.numbers, requires_grad=False)
        self.weight.state = QuantState(quantised.scale, QuantState(quantised.scale))

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.state
        assert state.scale is state.inner.scale
        return x @ (self.weight * state.scale).T


class Adapted(nn.Module):
    """A frozen layer, and the product of two small trained ones beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def linear_of(cls: type[Quantised]) -> Callable[[Tensor], nn.Module]:
    """A function from values to a layer with a frozen weight of this class."""

    def made(values: Tensor) -> nn.Module:
        layer = nn.Linear(4, 4, dtype=torch.float64, device=values.device).requires_grad_(False)
        layer.weight = nn.Parameter(cls.of(values), requires_grad=False)
        return layer

    return made


LAYERS: dict[str, Callable[[Tensor], nn.Module]] = {cls.__name__: linear_of(cls) for cls in WRAPPERS}
LAYERS["state on the parameter"] = Packed


def adapted(layer: Callable[[Tensor], nn.Module], device: torch.device) -> nn.Sequential:
    """Two layers with adapters."""
    torch.manual_seed(0)
    values = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    net = nn.Sequential(Adapted(layer(values[0].to(device))), nn.Tanh(), Adapted(layer(values[1].to(device))))
    for each in (net[0], net[2]):
        for part in (each.down, each.up):
            part.to(device, torch.float64)
    return net
