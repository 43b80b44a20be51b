"""`Launch`, the node of a launched forward in autograd's graph. Its backward launches the captured backward.

Only ``captured`` uses this file.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.node import Node

if TYPE_CHECKING:
    from dataparallel.replicas.graphs.captured import Captured


class Launch(Node):
    """The node of a launch. Its backward launches the captured backward."""

    @staticmethod
    def forward(
        ctx: Any, captured: Captured, inputs: Any, direct: Collection[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Launches the forward. ``tensors``: inputs and parameters that need gradients.

        ``direct``: positions of tensors whose gradients the launch that made them reads where this one leaves them.
        """
        ctx.captured, ctx.launch, ctx.direct = captured, captured.launches, direct
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:1])  # see `saved_instead`
        outputs = captured.launch_forward(inputs)
        ctx.versions = [_torch.version_of(output) for output in captured.outputs]
        ctx.mark_non_differentiable(
            *(output for output, place in zip(outputs, captured.outputs, strict=True) if not place.requires_grad)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Launches the backward.

        Raises:
            RuntimeError: what the forward has saved was overwritten by a later launch, or by other code.
        """
        captured: Captured = ctx.captured
        if captured.launches != ctx.launch:
            raise RuntimeError(
                "this backward needs what a forward has saved in a captured graph, and the graph was launched again "
                "since. Call backward before the next forward, or leave graphs=True out"
            )
        if [_torch.version_of(output) for output in captured.outputs] != ctx.versions:
            raise RuntimeError(
                "an output of a captured module was modified by an inplace operation, and its backward needs it. Write "
                "the result to another tensor, or leave graphs=True out"
            )
        given = [grad for grad, place in zip(grads, captured.outputs, strict=True) if place.requires_grad]
        return (None, None, None, *captured.launch_backward(given, ctx.direct))


def reads(node: Any, target: Tensor | None) -> bool:
    """True if ``node`` is that of a launch whose backward reads a gradient at ``target``."""
    captured = getattr(node, "captured", None)
    return any(place is target for place in getattr(captured, "grad_outputs", ()))


class Waiting:
    """Held by an autograd graph until its backward has run or it is gone. The captured graph is busy until then."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def __del__(self) -> None:
        self._captured.is_waiting = False
