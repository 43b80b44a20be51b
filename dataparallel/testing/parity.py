"""Does a module on several slots compute what it computes on one device?

`assert_same_step` and `assert_same_training` answer that for any module. They compare outputs,
gradients of parameters and of inputs, buffers, and the weights after an optimizer's steps. Equal
weights hide one kind of mistake: a replica that computes with the source's weights is right by accident.
`perturbed_slots` makes the weights of every slot different, and `reference_step_by_chunks` does the
same to one copy of the module per chunk.

These are helpers for tests, of the library and of its users. They need several copies of the
module, so they take a function that builds it, always with the same weights, modes and
`requires_grad` flags.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.forms.data_parallel import DataParallel
from dataparallel.forms.replicate import ReplicatedModule, ReplicateState, replicate
from dataparallel.testing.cases import Batch, Build, adamw
from dataparallel.testing.steps import (
    Loss,
    StepResults,
    as_leaves,
    assert_equal,
    assert_steps_match,
    chunks,
    concatenate,
    detached,
    device_of,
    mean_square_loss,
    run_step,
)

Wrap = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class Perturbation:
    """Noise for the weights: normal, times `scale`, different for every slot and every tensor."""

    seed: int = 0
    scale: float = 0.1

    def noise(self, like: Tensor, slot: int, index: int) -> Tensor:
        """The noise of slot `slot` for tensor number `index`; the same in every call."""
        generator = torch.Generator().manual_seed((self.seed * 1_009 + slot) * 100_003 + index)
        noise = torch.randn(like.shape, dtype=like.dtype, generator=generator)
        return (self.scale * noise).to(like.device)


def reference_step_by_chunks(
    build: Build,
    source: nn.Module,
    batch: Batch,
    slots: int,
    *,
    dim: int = 0,
    loss: Loss = mean_square_loss,
    perturbation: Perturbation | None = None,
) -> StepResults:
    """The step that `source` takes on `slots` slots, computed by separate modules on one device.

    The batch is cut as by `torch.chunk`. Each chunk runs through its own module from `build`, which
    has the values of `source` plus the slot's noise of `perturbation`. Outputs are concatenated
    along `dim`, gradients are summed over the modules, and buffers are those of the first module.
    `source` is not changed.
    """
    leaves, inputs = as_leaves(batch, device_of(source))
    parts = chunks(leaves, slots, dim)
    copies = [_copy(build, source, slot, perturbation) for slot in range(len(parts))]
    outputs = [copy(*args, **kwargs) for copy, (args, kwargs) in zip(copies, parts, strict=True)]
    output = concatenate(outputs, dim)
    loss(output).backward()
    parameters = [dict(copy.named_parameters()) for copy in copies]
    gradients: dict[str, Tensor | None] = {}
    for name, _ in source.named_parameters():
        present = [g for weights in parameters if (g := weights[name].grad) is not None]
        gradients[name] = sum(present[1:], start=present[0]) if present else None
    return StepResults(
        detached(output),
        gradients,
        [detached(leaf.grad) for leaf in inputs],
        detached(dict(copies[0].named_buffers())),
    )


def perturb(replicas: Sequence[nn.Module], perturbation: Perturbation) -> None:
    """Add the noise of each slot to the trainable tensors of its replica.

    Each tensor stays the same object with the same place in the autograd graph, and gets new memory.
    So every reference to it sees the new values, and memory that is shared with the source does not
    change.
    """
    for slot, replica in enumerate(replicas):
        for index, tensor in enumerate(_trainable(replica)):
            tensor.data = tensor.data + perturbation.noise(tensor, slot, index)


@contextlib.contextmanager
def perturbed_slots(parallel: Callable[..., Any], perturbation: Perturbation) -> Iterator[None]:
    """While open, every replica of `parallel` has the weights of its source plus noise of its own.

    `parallel` is a `DataParallel` on several slots, or a module after
    `dataparallel.composable.replicate`. Its stage `replicate` is overridden, as in a subclass, by one
    that calls `perturb` on the replicas. Calls have to record a graph.

    Raises:
        TypeError: `parallel` makes no replicas.
        AssertionError: in a call, if a replica has a trainable tensor of the source.
    """
    owner = replicate.state(parallel) if isinstance(parallel, ReplicatedModule) else parallel
    if not isinstance(owner, (DataParallel, ReplicateState)):
        raise TypeError(
            "the weights of slots are perturbed where replicas are made: pass a DataParallel, or a module after "
            f"dataparallel.composable.replicate; got {type(parallel).__name__}"
        )
    make_replicas = owner.replicate

    def make_perturbed(source: nn.Module, devices: Any) -> list[nn.Module]:
        replicas = list(make_replicas(source, devices))
        own = {id(tensor) for tensor in _trainable(source)}
        for slot, replica in enumerate(replicas):
            if any(id(tensor) in own for tensor in _trainable(replica)):
                raise AssertionError(f"slot {slot} computes with tensors of the source, not with its own")
        perturb(replicas, perturbation)
        return replicas

    overridden = vars(owner).get("replicate")
    vars(owner)["replicate"] = make_perturbed
    try:
        yield
    finally:
        if overridden is None:
            del vars(owner)["replicate"]
        else:
            vars(owner)["replicate"] = overridden


def assert_same_step(
    build: Build,
    batch: Batch,
    slots: Sequence[Any],
    *,
    dim: int = 0,
    loss: Loss = mean_square_loss,
    atol: float = 1e-9,
    by_chunks: bool = False,
    perturbation: Perturbation | None = None,
    wrap: Wrap = DataParallel,
) -> None:
    """Assert that one training step on `slots` equals the step on one device.

    Args:
        build: returns the module, on the CPU and with the same weights at every call.
        batch: positional and keyword arguments; all tensors with dimensions are cut along `dim`.
        slots: where replicas run; the module and the batch are moved to the first of them.
        loss: from the gathered output to a scalar.
        by_chunks: compare with `reference_step_by_chunks`, for modules in which the samples of a
            batch influence each other (BatchNorm in training).
        perturbation: gives every slot other weights; the reference is then by chunks too.
        wrap: makes the parallel callable, as `wrap(module, slots, dim=dim)`. With a perturbation it has to return
            a `DataParallel` or a module after `dataparallel.composable.replicate`.

    Raises:
        AssertionError: the steps differ; the message says in what.
        TypeError: there is a perturbation, and the callable makes no replicas: see `perturbed_slots`.
    """
    root = torch.device(slots[0])
    source, reference = build().to(root), build().to(root)
    parallel = wrap(source, slots, dim=dim)
    if by_chunks or perturbation is not None:
        expected = reference_step_by_chunks(
            build, reference, batch, len(slots), dim=dim, loss=loss, perturbation=perturbation
        )
    else:
        expected = run_step(reference, batch, loss=loss)
    noisy = contextlib.nullcontext()
    with noisy if perturbation is None else perturbed_slots(parallel, perturbation):
        actual = run_step(source, batch, loss=loss, call=parallel)
    assert_steps_match(actual, expected, atol=atol)


def assert_same_training(
    build: Build,
    batches: Iterable[Batch],
    slots: Sequence[Any],
    *,
    dim: int = 0,
    loss: Loss = mean_square_loss,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = adamw,
    atol: float = 1e-9,
    by_chunks: bool = False,
    wrap: Wrap = DataParallel,
) -> None:
    """Assert that one optimizer step per batch leaves the same weights as on one device.

    Every step is compared as in `assert_same_step`, then the weights are. `optimizer` makes an
    optimizer of parameters (AdamW by default).
    """
    root = torch.device(slots[0])
    source, reference = build().to(root), build().to(root)
    parallel = wrap(source, slots, dim=dim)
    ours, theirs = optimizer(source.parameters()), optimizer(reference.parameters())
    for batch in batches:
        actual = run_step(source, batch, loss=loss, call=parallel)
        if by_chunks:
            expected = reference_step_by_chunks(build, reference, batch, len(slots), dim=dim, loss=loss)
            _adopt(reference, expected)
        else:
            expected = run_step(reference, batch, loss=loss)
        assert_steps_match(actual, expected, atol=atol)
        ours.step()
        theirs.step()
        assert_equal(source.state_dict(), reference.state_dict(), "state_dict", atol=atol)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _trainable(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in _tensors(module) if tensor.requires_grad]


def _copy(build: Build, source: nn.Module, slot: int, perturbation: Perturbation | None) -> nn.Module:
    # Not deepcopy, which refuses modules that keep results of autograd (the older weight_norm).
    copy = build().to(device_of(source))
    with torch.no_grad():
        for ours, theirs in zip(_tensors(copy), _tensors(source), strict=True):
            ours.copy_(theirs)
        if perturbation is not None:
            for index, tensor in enumerate(_trainable(copy)):
                tensor.add_(perturbation.noise(tensor, slot, index))
    return copy


def _adopt(module: nn.Module, step: StepResults) -> None:
    for name, parameter in module.named_parameters():
        parameter.grad = step.gradients[name]
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(step.buffers[name])
