"""Methods of sharded tensors in which torch's own would hide an error, or hand out memory that is not there.

Python's operators (``+``, ``@``, ``==``, ``*=``): torch's methods turn a ``TypeError`` into ``NotImplemented``. Then
Python says only that the operands are unsupported, and ``==`` compares the two objects and gives False. The methods
here call torch's functions instead. Operands that are neither tensors nor numbers are ``NotImplemented``, as
everywhere.

Methods for the memory of a tensor: there is none. They raise ``TypeError``.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any, NoReturn

import torch
from torch import Tensor

from dataparallel import _torch

Method = Callable[[Any, Any], Any]

FORWARD: dict[str, Method] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "pow": torch.pow,
    "matmul": torch.matmul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


def _divided_by(right: Tensor, left: Any) -> Tensor:
    """``left / right`` to the bit of torch's own: for numbers that is by way of the reciprocal."""
    return torch.true_divide(left, right) if isinstance(left, Tensor) else torch.mul(torch.reciprocal(right), left)


# Called with the right operand, whose method it is, and the left one.
REFLECTED: dict[str, Method] = {
    "radd": torch.add,
    "rsub": torch.rsub,
    "rmul": torch.mul,
    "rtruediv": _divided_by,
    "rfloordiv": lambda right, left: torch.floor_divide(left, right),
    "rmod": lambda right, left: torch.remainder(left, right),
    "rpow": lambda right, left: torch.pow(left, right),
    "rmatmul": lambda right, left: torch.matmul(left, right),
    "rand": torch.bitwise_and,
    "ror": torch.bitwise_or,
    "rxor": torch.bitwise_xor,
    "rlshift": lambda right, left: torch.bitwise_left_shift(left, right),
    "rrshift": lambda right, left: torch.bitwise_right_shift(left, right),
}

IN_PLACE: dict[str, Method] = {
    "iadd": Tensor.add_,
    "isub": Tensor.sub_,
    "imul": Tensor.mul_,
    "itruediv": Tensor.div_,
    "ifloordiv": Tensor.floor_divide_,
    "imod": Tensor.remainder_,
    "ipow": Tensor.pow_,
    "iand": Tensor.bitwise_and_,
    "ior": Tensor.bitwise_or_,
    "ixor": Tensor.bitwise_xor_,
    "ilshift": Tensor.bitwise_left_shift_,
    "irshift": Tensor.bitwise_right_shift_,
}


def _method(name: str, function: Method) -> Method:
    def method(self: Tensor, other: Any) -> Any:
        if isinstance(other, (Tensor, Number)):
            return function(self, other)
        return NotImplemented

    method.__name__ = method.__qualname__ = name
    return method


REFUSED = (
    "numpy",
    "tolist",
    "storage",
    "untyped_storage",
    "_typed_storage",
    "share_memory_",
    "apply_",
    "map_",
    "map2_",
    "__array__",
    "__dlpack__",
)


class _NoMemory(TypeError, _torch.UnsupportedFakeTensor):
    """``torch.compile`` takes it for a tensor that cannot be in a graph: it ends the graph, and goes on after it."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = sentence  # torch reads it

    __repr__ = TypeError.__repr__


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise _NoMemory(
            f"{name} does not work on sharded tensors, whose memory is that of their shards; "
            "use full_tensor() to get the whole tensor first"
        )

    method.__name__ = method.__qualname__ = name
    return method


_refuse_data_ptr = _refusing("data_ptr")


def data_ptr(self: Tensor) -> int:
    """Raises, except where torch takes 0 for a tensor whose storage it cannot use.

    Others would take all sharded tensors for one, if all had the address 0.
    """
    return 0 if _torch.takes_address_0() else _refuse_data_ptr(self)


METHODS: dict[str, Any] = {
    f"__{name}__": _method(f"__{name}__", function) for name, function in (FORWARD | REFLECTED | IN_PLACE).items()
}
"""The methods by name."""
METHODS.update({name: _refusing(name) for name in REFUSED})
METHODS["data_ptr"] = data_ptr
METHODS["__hash__"] = Tensor.__hash__  # a class that has __eq__ has no hash otherwise
