"""Checks that a module is where its forward needs it: every parameter and buffer on the first slot.

``data_parallel`` and the composable forms check at each call, because a module may be moved or materialised between
calls. Nothing is moved here.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from dataparallel.modules.plan import dotted

__all__ = ["check_placement"]


def check_placement(
    module: nn.Module,
    root: torch.device,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[int] = (),
) -> None:
    """Checks every parameter and buffer, except ``ignored_parameters`` (ids) and those below ``ignored_modules``.

    Raises:
        RuntimeError: one is not on ``root``; the message names it and says what to call.
    """
    for name, submodule in module.named_modules(memo={*ignored_modules}):
        for registry in (submodule._parameters, submodule._buffers):
            for key, tensor in registry.items():
                if tensor is not None and tensor.device != root and id(tensor) not in ignored_parameters:
                    kind = "parameter" if registry is submodule._parameters else "buffer"
                    raise _misplaced(f"{kind} {dotted(name, key)!r}", tensor, root)


def _misplaced(what: str, tensor: Tensor, root: torch.device) -> RuntimeError:
    # The first sentence is torch.nn.DataParallel's, which people search for.
    words = (
        f"module must have its parameters and buffers on device {root} (device_ids[0]) but found one of them "
        f"on device: {tensor.device}. "
    )
    if tensor.device.type == "meta":
        return RuntimeError(
            f"{words}It is {what}, which has no values there; materialise it first: call "
            f"module.to_empty(device={str(root)!r}), then load a state dict or initialise all parameters and buffers"
        )
    return RuntimeError(f"{words}It is {what}; call module.to({str(root)!r}) before the forward")
