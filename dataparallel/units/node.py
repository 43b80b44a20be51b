"""The node of autograd's graph that a unit's parameters on one slot are outputs of.

The engine runs its backward when it has all gradients of the unit on the slot that this pass computes, in the thread of
the slot's device and on the stream of its forward. That is the moment at which gradients are handed on, and the
parameters are not needed any more. The node stays, as the parameters do, and all graphs lead to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel.autograd.node import Node
from dataparallel.autograd.node_order import run_first

__all__ = ["make_outputs"]


def make_outputs(
    tensors: Sequence[Tensor], device: torch.device, receive: Callable[[Sequence[Tensor | None]], None]
) -> None:
    """Makes ``tensors`` outputs of a node whose backward calls the method ``receive`` with their gradients.

    The node refers weakly to the method's object.
    """
    with torch.inference_mode(False), torch.enable_grad():
        handle = torch.empty(0, device=device, requires_grad=True)
        _ToOwners.apply(handle, list(tensors), weakref.WeakMethod(receive))


class _ToOwners(Node):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, tensors: list[Tensor], receive: weakref.WeakMethod[Any]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.receive = receive
        run_first(ctx)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        receive = ctx.receive()
        if receive is None:
            raise RuntimeError("the module whose parameters this graph uses is gone: keep it until backward has ended")
        if any(grad is not None for grad in grads):
            receive(grads)
        return None, None, None
