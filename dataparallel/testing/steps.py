"""One training step as a value: run it, keep its results, compare it with another.

This file knows no slots. `parity` decides which two steps should be equal.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

from dataparallel.testing.cases import Batch

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class StepResults:
    """The results of one forward and one backward.

    `gradients` has an entry for every parameter (`None` if it has no gradient), `input_gradients`
    one for every floating-point or complex tensor of the batch, in order.
    """

    output: Any
    gradients: dict[str, Tensor | None]
    input_gradients: list[Tensor | None]
    buffers: dict[str, Tensor]


def mean_square_loss(output: Any) -> Tensor:
    """Mean squared distance of all tensors in `output` from fixed targets, different for each."""
    leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
    total = torch.zeros((), dtype=torch.float64, device=leaves[0].device)
    for leaf in leaves:
        target = torch.arange(leaf.numel(), dtype=torch.float64, device=leaf.device).sin()
        total = total + (leaf - target.view(leaf.shape)).abs().square().mean()
    return total


def run_step(
    module: nn.Module,
    batch: Batch,
    *,
    loss: Loss = mean_square_loss,
    call: Callable[..., Any] | None = None,
) -> StepResults:
    """Runs forward through `call` (`module` itself by default) and backward, and returns the results.

    `batch` is a tuple of positional arguments and a dict of keyword arguments on any device.
    Former gradients of `module` are dropped.
    """
    module.zero_grad(set_to_none=True)
    (args, kwargs), inputs = as_leaves(batch, device_of(module))
    output = (call or module)(*args, **kwargs)
    loss(output).backward()
    return StepResults(
        detached(output),
        {name: detached(parameter.grad) for name, parameter in module.named_parameters()},
        [detached(leaf.grad) for leaf in inputs],
        detached(dict(module.named_buffers())),
    )


def assert_steps_match(actual: StepResults, expected: StepResults, *, atol: float = 1e-9) -> None:
    """Fail with the name of the first tensor that differs by more than `atol`, or is missing.

    Two sparse tensors are compared by their dense values. A sparse and a dense one differ.
    """
    for field in ("output", "gradients", "input_gradients", "buffers"):
        assert_equal(getattr(actual, field), getattr(expected, field), field, atol=atol)


def assert_equal(actual: Any, expected: Any, name: str, *, atol: float) -> None:
    """Fail with the path of the first leaf of two trees that differs; `name` is their root."""
    ours, our_spec = tree_flatten_with_path(actual)
    theirs, their_spec = tree_flatten_with_path(expected)
    if our_spec != their_spec:
        raise AssertionError(f"{name} is {our_spec}, but {their_spec} on one device")
    for (path, found), (_, wanted) in zip(ours, theirs, strict=True):
        where = name + keystr(path)
        if not (isinstance(found, Tensor) and isinstance(wanted, Tensor)):
            if found is not wanted and found != wanted:
                kinds = ["a tensor" if isinstance(x, Tensor) else repr(x) for x in (found, wanted)]
                raise AssertionError(f"{where} is {kinds[0]}, but {kinds[1]} on one device")
        elif found.layout != wanted.layout:
            raise AssertionError(f"{where} is {found.layout}, but {wanted.layout} on one device")
        else:
            torch.testing.assert_close(
                found.to_dense(),
                wanted.to_dense(),
                atol=atol,
                rtol=0,
                msg=functools.partial("{}: {}".format, where),
            )


def device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter."""
    return next(module.parameters()).device


def detached(tree: Any) -> Any:
    """The same tree with copies of its tensors, outside the autograd graph."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def as_leaves(batch: Batch, device: torch.device) -> tuple[Batch, list[Tensor]]:
    """A copy of the batch on `device`, and those of its tensors that get gradients."""
    leaves, spec = tree_flatten(detached(batch))
    leaves = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    inputs = [
        leaf.requires_grad_()
        for leaf in leaves
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
    return tree_unflatten(leaves, spec), inputs


def chunks(batch: Batch, slots: int, dim: int) -> list[Batch]:
    """The batch, cut as by `torch.chunk`. Numbers and 0-dim tensors are in every chunk."""
    leaves, spec = tree_flatten(batch)
    columns = [
        leaf.chunk(slots, dim) if isinstance(leaf, Tensor) and leaf.dim() > 0 else (leaf,) * slots for leaf in leaves
    ]
    # A batch of few samples makes fewer chunks than there are slots.
    return [tree_unflatten(list(row), spec) for row in zip(*columns, strict=False)]


def concatenate(outputs: list[Any], dim: int) -> Any:
    """The outputs of chunks as one output: tensors are concatenated, 0-dim tensors become a vector."""

    def join(first: Any, *others: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        return torch.cat((first, *others), dim) if first.dim() else torch.stack((first, *others))

    return tree_map(join, *outputs)
