"""Trains sharded models and their twins on one device, and compares the whole tensors, in float64 to 1e-9.

What a step is differs between loops: one backward, several that are summed or wait, or two forwards first. The models
are in `sharded_models`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dataparallel.composable import fully_shard
from dataparallel.sharded import ShardedTensor
from dataparallel.testing.cases import Batch, Build, MakeBatch, adamw, numbers, seeded, tokens
from dataparallel.testing.steps import Loss, assert_equal, mean_square_loss
from sharded_models import GPT, LENGTH, VOCABULARY, Apart, Awkward, ResNet

Take = Callable[[], Batch]
Loop = Callable[[nn.Module, Take, Loss], list[Tensor]]


@dataclass(frozen=True)
class Model:
    """A model and its batches. ``by_chunks``: the samples of a chunk influence each other."""

    build: Build
    batch: MakeBatch
    by_chunks: bool = False


_tokens = tokens(LENGTH, VOCABULARY)
_pictures = numbers(2, 8, 8)

MODELS = {
    "gpt": Model(seeded(GPT), _tokens),
    "gpt, units of several kinds": Model(seeded(Apart), _tokens),
    "gpt, checkpoints inside units": Model(seeded(GPT, "inside"), _tokens),
    "gpt, checkpoints around units": Model(seeded(GPT, "around"), _tokens),
    "gpt, reentrant checkpoints inside units": Model(seeded(GPT, "inside", True), _tokens),
    "gpt, reentrant checkpoints around units": Model(seeded(GPT, "around", True), _tokens),
    "resnet": Model(seeded(ResNet), _pictures),
    "unused and repeated units": Model(seeded(Awkward), numbers(6)),
}


def on_device(build: Build, device: Any) -> nn.Module:
    """A model on a device. Moving a module to a simulated device unties its weights: they are tied again."""
    model = build()
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    model.to(device)
    for first, *others in names.values():
        for other in others:
            parent, _, own = other.rpartition(".")
            setattr(model.get_submodule(parent), own, model.get_parameter(first))
    return model


def sharded(model: nn.Module, slots: Sequence[Any], *, ignored_params: Iterable[Tensor] = (), **options: Any) -> Any:
    """Applies `fully_shard` to the model's units, then to the model, and returns the model.

    ``output_device`` is for the model alone, ``ignored_params`` for the units that have them; other options are for
    each unit.
    """
    ignored = {id(parameter) for parameter in ignored_params}
    below = {name: value for name, value in options.items() if name != "output_device"}
    for unit in model.units():
        inside = [p for module in (unit if isinstance(unit, list) else [unit]) for p in module.parameters()]
        fully_shard(unit, devices=slots, ignored_params={p for p in inside if id(p) in ignored}, **below)
    return fully_shard(model, devices=slots, ignored_params=set(ignored_params), **options)


def whole(tree: Any) -> Any:
    """The same nested structure with copies of its tensors on the CPU, of sharded tensors the whole ones."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(leaf, ShardedTensor):
            return leaf.full_tensor("cpu").detach().clone()
        return leaf.detach().cpu().clone()

    return tree_map(copied, tree)


def state(model: nn.Module) -> dict[str, Tensor]:
    """The whole values of parameters and buffers."""
    return whole({**dict(model.named_parameters()), **dict(model.named_buffers())})


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The whole gradients of parameters, `None` where there is none."""
    return whole({name: parameter.grad for name, parameter in model.named_parameters()})


def assert_all_sharded(model: nn.Module, ignored: Iterable[Tensor] = ()) -> None:
    """Asserts that each parameter is a sharded tensor, and has a sharded gradient or none."""
    ours = {id(parameter) for parameter in ignored}
    for name, parameter in model.named_parameters():
        if id(parameter) not in ours:
            assert isinstance(parameter, ShardedTensor), name
            assert isinstance(parameter, nn.Parameter), name
            assert parameter.grad is None or isinstance(parameter.grad, ShardedTensor), name


def moved(batch: Batch, device: Any) -> Batch:
    found: Batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
    return found


def no_sync(model: nn.Module) -> AbstractContextManager[Any]:
    """``no_sync()`` of a sharded model. A model on one device has nothing that could wait."""
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()


def forward(model: nn.Module, take: Take, loss: Loss) -> Tensor:
    args, kwargs = take()
    return loss(model(*args, **kwargs))


def one_backward(model: nn.Module, take: Take, loss: Loss) -> list[Tensor]:
    value = forward(model, take, loss)
    value.backward()
    return [value]


def each_summed(model: nn.Module, take: Take, loss: Loss) -> list[Tensor]:
    return [value for _ in range(3) for value in one_backward(model, take, loss)]


def the_last_summed(model: nn.Module, take: Take, loss: Loss) -> list[Tensor]:
    with no_sync(model):
        first = [value for _ in range(2) for value in one_backward(model, take, loss)]
    return [*first, *one_backward(model, take, loss)]


def first_forward_first(model: nn.Module, take: Take, loss: Loss) -> list[Tensor]:
    values = [forward(model, take, loss) for _ in range(2)]
    for value in values:
        value.backward()
    return values


def last_forward_first(model: nn.Module, take: Take, loss: Loss) -> list[Tensor]:
    values = [forward(model, take, loss) for _ in range(2)]
    for value in reversed(values):
        value.backward()
    return values


def two_forwards_together(model: nn.Module, take: Take, loss: Loss) -> list[Tensor]:
    values = [forward(model, take, loss) for _ in range(2)]
    (values[0] + values[1]).backward()
    return values


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        one_backward,
        each_summed,
        the_last_summed,
        first_forward_first,
        last_forward_first,
        two_forwards_together,
    )
}


@dataclass
class Trained:
    """For each step the losses and the gradients before the optimizer, and the values at the end."""

    losses: list[Any] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | torch.optim.Optimizer = adamw,
    steps: int = 3,
    *,
    loop: Loop = one_backward,
    loss: Loss = mean_square_loss,
) -> Trained:
    """Trains for ``steps`` steps on as many batches as the loop takes.

    An ``optimizer`` that is a function gets the model's parameters as they are now.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
    following: Iterator[Batch] = iter(batches)
    trained = Trained()
    for _ in range(steps):
        optimizer.zero_grad()
        trained.losses.append(whole(loop(model, lambda: next(following), loss)))
        trained.gradients.append(gradients(model))
        optimizer.step()
    optimizer.zero_grad()
    trained.state = state(model)
    return trained


def batches_of(model: Model, slots: Sequence[Any], seed: int = 0) -> Iterator[Batch]:
    """Batches on the first slot, without end.

    Some divide evenly among the slots, some do not, and some leave slots without samples.
    """
    count = len(slots)
    sizes = [2 * count, 2 * count + 1, max(count - 1, 1), 3 * count - 1, 1]
    for number, size in zip(itertools.count(seed), itertools.cycle(sizes), strict=False):
        yield moved(model.batch(size, number), slots[0])


def assert_same_training(
    model: Model,
    slots: Sequence[Any],
    *,
    loop: Loop = one_backward,
    steps: int = 3,
    afterwards: Callable[[nn.Module], None] = lambda model: None,
    ignored: bool = False,
    **options: Any,
) -> None:
    """Asserts that a sharded model trains as its twin does on one device.

    Args:
        afterwards: is called with the sharded model.
        ignored: the model's ``ignored()`` parameters are ignored.
        options: of `fully_shard`.
    """
    root = torch.device(slots[0])
    several, one = on_device(model.build, root), on_device(model.build, root)
    kept = several.ignored() if ignored else []
    sharded(several, slots, ignored_params=kept, **options)
    afterwards(several)
    assert_all_sharded(several, kept)
    ours = train(several, batches_of(model, slots), steps=steps, loop=loop)
    assert_all_sharded(several, kept)
    theirs = train(one, batches_of(model, slots), steps=steps, loop=loop)
    assert_same(ours, theirs)


def assert_same(ours: Trained, theirs: Trained, *, losses: bool = True, atol: float = 1e-9) -> None:
    if losses:
        assert_equal(ours.losses, theirs.losses, "losses", atol=atol)
    for step, (found, expected) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        assert_equal(found, expected, f"gradients of step {step}", atol=atol)
    assert_equal(ours.state, theirs.state, "state", atol=atol)
