"""`LaunchNode`, the nodes of a launched forward in autograd's graph. Their backwards launch the captured backward.

Only ``captured`` uses this file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.node import Node

if TYPE_CHECKING:
    from dataparallel.replicas.graphs.captured import Captured
    from dataparallel.replicas.graphs.places import FlatGrads
    from dataparallel.replicas.graphs.pools import CapturedGraphs


@dataclass(kw_only=True)
class BackwardStage:
    """A piece of a captured backward, and what its node takes and gives.

    Attributes:
        outputs: places of what the node gives: the outputs of the module, or the tensor at which the next piece begins.
        have_grads: for each of them if the piece takes its gradient.
        grad_outputs: where the piece reads these gradients.
        inputs, parameters: what it computes gradients of: arguments, by position among those that need gradients.
        targets: for each of ``inputs`` where the launch that made it reads its gradient, if there is such a place.
        recording: the graph.
        runs_once: it may write to what the forward has saved.
        grads_below: where it leaves the gradient of what the piece below gives, if there is one.
        grads: the other gradients.
    """

    outputs: Sequence[Tensor]
    have_grads: Sequence[bool]
    grad_outputs: Sequence[Tensor]
    inputs: Sequence[int]
    parameters: Sequence[Tensor]
    targets: Sequence[Tensor | None]
    recording: CapturedGraphs
    runs_once: bool
    grads_below: Sequence[Tensor] = ()
    grads: FlatGrads | None = None

    def versions(self) -> list[int]:
        """Of the outputs: they tell if other code has modified one."""
        return [_torch.version_of(output) for output in self.outputs]


class LaunchNode(Node):
    """The node of one piece of a launch. Its backward launches that piece of the captured backward.

    The nodes of a launch follow each other: each but the first takes what the one below gives.
    """

    @staticmethod
    def forward(
        ctx: Any, captured: Captured, stage: BackwardStage, direct: Collection[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Called after the forward has been launched. ``tensors``: what needs gradients.

        ``direct``: positions of arguments whose gradients the launch that made them reads where this one leaves them.
        """
        ctx.captured, ctx.launch, ctx.stage, ctx.direct = captured, captured.launches, stage, direct
        ctx.has_run = False
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:1])  # see `saved_instead`
        ctx.versions = stage.versions()
        outputs = tuple(output.detach() for output in stage.outputs)
        ctx.mark_non_differentiable(
            *(output for output, has_grad in zip(outputs, stage.have_grads, strict=True) if not has_grad)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Launches the piece.

        Raises:
            RuntimeError: what the forward has saved was overwritten by a later launch, by other code, or perhaps by
                this piece itself, if it is compiled and was launched before.
        """
        stage: BackwardStage = ctx.stage
        if ctx.captured.launches != ctx.launch:
            raise RuntimeError(
                "this backward needs what a forward has saved in a captured graph, and the graph was launched again "
                "since. Call backward before the next forward, or leave graphs=True out"
            )
        if stage.versions() != ctx.versions:
            raise RuntimeError(
                "an output of a captured module was modified by an inplace operation, and its backward needs it. Write "
                "the result to another tensor, or leave graphs=True out"
            )
        if ctx.has_run and stage.runs_once:
            raise RuntimeError(
                "this backward is compiled and has run already, and compiled code may write to what the forward has "
                "saved. Call the model again instead of backward with retain_graph=True"
            )
        ctx.has_run = True
        given = [grad for grad, has_grad in zip(grads, stage.have_grads, strict=True) if has_grad]
        return (None, None, None, *ctx.captured.launch_stage(stage, given, ctx.direct))


def reads(node: Any, target: Tensor | None) -> bool:
    """True if ``node`` is that of a launch whose backward reads a gradient at ``target``."""
    stage = getattr(node, "stage", None)
    return any(place is target for place in getattr(stage, "grad_outputs", ()))


class Waiting:
    """Held by an autograd graph until its backward has run or it is gone. The captured graph is busy until then."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def __del__(self) -> None:
        self._captured.is_waiting = False
