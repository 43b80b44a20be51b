"""Trains compiled models on slots, and their twins on one device without the compiler, and counts compilations.

`FORMS` are the library's three forms, and `WAYS` say what is compiled and when. `trained` makes the steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compiled_backends import graphs
from dataparallel import DataParallel
from dataparallel.composable import replicate
from dataparallel.testing.cases import Batch, adamw
from dataparallel.testing.steps import assert_equal, chunks, concatenate, mean_square_loss
from sharded_steps import Model, gradients, moved, on_device, sharded, state, whole

Form = Callable[..., Callable[..., Any]]


def wrapper(model: nn.Module, slots: Sequence[Any], **options: Any) -> Callable[..., Any]:
    return DataParallel(model, slots, **options)


def in_place(model: nn.Module, slots: Sequence[Any], **options: Any) -> Callable[..., Any]:
    return replicate(model, devices=slots, **options)


FORMS: dict[str, Form] = {"DataParallel": wrapper, "replicate": in_place, "fully_shard": sharded}

WAYS = ("argument", "before", "blocks")
"""What is compiled, and when: the model by an argument of the form, the model before, or each of its blocks before."""


def compiled(form: str, way: str, model: nn.Module, slots: Sequence[Any], options: Mapping[str, Any]) -> Callable:
    """The model in a form on the slots, compiled in a way with these options of ``torch.compile``.

    The wrapper takes what ``torch.compile`` returns. The forms that change a module take it compiled in place.
    """
    if way == "argument":
        return FORMS[form](model, slots, compile=dict(options))
    if (form, way) == ("DataParallel", "before"):
        return wrapper(torch.compile(model, **options), slots)
    compile_in_place(way, model, options)
    return FORMS[form](model, slots)


def compile_in_place(way: str, model: Any, options: Mapping[str, Any]) -> None:
    for module in model.units() if way == "blocks" else [model]:
        module.compile(**options)


class InChunks(nn.Module):
    """Calls the model on one device with one chunk of a batch after the other, as slots do.

    Each chunk sees the buffers as they were before the call. Those that the first chunk leaves stay.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model = model
        self.count = count

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = chunks((args, kwargs), self.count, 0)
        copies = [{name: buffer.clone() for name, buffer in self.model.named_buffers()} for _ in others]
        outputs = [self.model(*first[0], **first[1])]
        for buffers, (own, named) in zip(copies, others, strict=True):
            outputs.append(torch.func.functional_call(self.model, buffers, own, named))
        return concatenate(outputs, 0)


def sizes(count: int) -> tuple[int, int]:
    """The samples of a batch and of the last batch of an epoch, which is smaller and cannot be divided evenly.

    No chunk has a single sample, for which compilers make code of its own, or as many as another dimension has: the
    compiler would take both for one size that varies.
    """
    return 12 * count, 10 * count - 1


def batches(model: Model, count: int, device: Any, steps: int) -> Iterator[Batch]:
    """Epochs of two batches."""
    for step in range(steps):
        yield moved(model.batch(sizes(count)[step % 2], step), device)


@dataclass
class Training:
    """After each step: the loss, the gradients, the values after the optimizer's step, and all compilations so far."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    compilations: list[int] = field(default_factory=list)


def trained(call: Callable[..., Any], model: nn.Module, of: Model, slots: Sequence[Any], steps: int) -> Training:
    """Trains ``model``, the source or the module on one device, with AdamW through ``call``."""
    optimizer = adamw(model.parameters())
    training = Training()
    for args, kwargs in batches(of, len(slots), slots[0], steps):
        optimizer.zero_grad()
        loss = mean_square_loss(call(*args, **kwargs))
        loss.backward()
        training.losses.append(whole(loss))
        training.gradients.append(gradients(model))
        optimizer.step()
        training.states.append(state(model))
        training.compilations.append(graphs())
    return training


def trained_on_one_device(of: Model, slots: Sequence[Any], steps: int) -> Training:
    """Without the compiler."""
    model = on_device(of.build, slots[0])
    return trained(InChunks(model, len(slots)) if of.by_chunks else model, model, of, slots, steps)


def assert_same(ours: Training, theirs: Training, atol: float) -> None:
    """Asserts that losses, gradients and values are those of one device, step by step."""
    for step, (found, expected) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        assert_equal(found, expected, f"the loss of step {step + 1}", atol=atol)
        for name in ("gradients", "states"):
            found, expected = getattr(ours, name)[step], getattr(theirs, name)[step]
            assert_equal(found, expected, f"{name} of step {step + 1}", atol=atol)


def pieces(form: str, way: str, model: Any) -> list[nn.Module]:
    """The modules whose calls are compiled by themselves. In a sharded model no graph goes beyond a unit."""
    if way == "blocks":
        return model.units()
    return [model] if form != "fully_shard" else [*apart(model, model.units())]


def apart(module: nn.Module, units: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The units below the module, and the largest modules beside them that can be called and hold no unit."""
    below = [*module.modules()]
    if module in units or (type(module) is not nn.ModuleList and not any(unit in below for unit in units)):
        yield module
    else:
        for child in module.children():
            yield from apart(child, units)


def calls_of_pieces(form: str, way: str, of: Model) -> int:
    """How often the pieces are called in one forward."""
    model = on_device(of.build, "cpu")
    calls: list[nn.Module] = []
    for piece in pieces(form, way, model):
        piece.register_forward_pre_hook(lambda module, args: calls.append(module))
    args, kwargs = of.batch(2, 0)
    model(*args, **kwargs)
    return len(calls)


def forget() -> None:
    """Makes the compiler forget all that it has compiled and counted in this process."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
