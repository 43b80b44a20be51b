"""Policies of ``fully_shard``: which dtypes a unit computes and sums in, and where its shards are kept.

They have the names, fields and defaults of ``torch.distributed.fsdp``. This file checks the fields and does nothing
else: ``forms.fully_shard_state`` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one unit. Sharded parameters, and so the optimizer's state, keep their own dtype.

    Unlike autocast this chooses one dtype for a whole module: its full parameters, what it saves for backward, its
    inputs. All four fields concern floating-point tensors only.

    Attributes:
        param_dtype: the dtype of the full parameters, in which they are gathered. ``None``: that of the sharded ones.
        reduce_dtype: the dtype in which gradients of the slots are summed, and wait inside ``no_sync``. ``None``:
            ``param_dtype``.
        output_dtype: the dtype of what the module's forward returns. ``None``: whatever it returns.
        cast_forward_inputs: if true, the inputs of the module's forward are cast to ``param_dtype``.

    Raises:
        TypeError: a field has another type.
        ValueError: a dtype is not a floating-point one.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name}={dtype!r}: expected a torch.dtype, torch.bfloat16 for example, or None")
            if not dtype.is_floating_point:
                raise ValueError(f"{name}={dtype}: expected a floating-point dtype, torch.bfloat16 for example")
        _check_flag("cast_forward_inputs", self.cast_forward_inputs)


@dataclass(frozen=True)
class OffloadPolicy:
    """Says that the shards stay on the devices that own them. It is the base of other policies."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Says that shards, their gradients and the optimizer's state are kept in host memory.

    A shard is copied to its owner before the unit is gathered, and its gradient is copied back in backward. The
    optimizer steps on the CPU.

    Attributes:
        pin_memory: if true, this memory is pinned, so that copies run beside other work. Other processes cannot use
            pinned memory: turn it off where there is too little.

    Raises:
        TypeError: ``pin_memory`` is no bool.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        _check_flag("pin_memory", self.pin_memory)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected True or False")
