"""`hint_of` says what to do about errors of replicas that come from the split, and that one device does not raise.

``parallel_apply`` adds the hint to the error that it raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel._torch import HOOK_TABLES, REGISTRIES

_TWO_DEVICES = "same device"
_ONE_VALUE = "Expected more than 1 value per channel"


def hint_of(error: BaseException, module: Any, device: torch.device) -> str | None:
    """Returns what to do about an error that a replica, ``module``, has raised on its device, if that is known."""
    try:
        text = str(error)
    except Exception:  # the error's __str__ raises
        return None
    if _ONE_VALUE in text:
        return (
            "BatchNorm in training needs two values of a channel, and this chunk has one sample. Take a batch with two "
            "samples or more for each slot (DataLoader(..., drop_last=True) for the last one), or statistics of the "
            "whole batch: pass sync_batch_norm=True where you wrap the model"
        )
    if _TWO_DEVICES not in text or not isinstance(module, nn.Module):
        return None
    for path, name, where in _tensors_elsewhere(module, device):
        if str(where) in text:
            return (
                f"The attribute {f'{path}.{name}'.lstrip('.')!r} of the {type(module).__name__} is on {where}: a "
                "tensor in a plain attribute stays where it is. Make it a buffer, which is copied to each device: "
                f"self.register_buffer({name!r}, tensor)"
            )
    return (
        "A tensor that is no argument, parameter or buffer of the module is on another device. Make "
        "tensors in forward with device=x.device, and keep others as buffers: self.register_buffer('name', tensor)"
    )


def _tensors_elsewhere(module: nn.Module, device: torch.device) -> Iterator[tuple[str, str, torch.device]]:
    """Yields path of the module, name and device of attributes that are, or hold, a tensor on another device."""
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name in (*REGISTRIES, *HOOK_TABLES):
                continue
            held = [*value.values()] if isinstance(value, dict) else value
            held = held if isinstance(held, (list, tuple)) else [held]
            for each in held:
                if isinstance(each, Tensor) and each.device != device:
                    yield path, name, each.device
