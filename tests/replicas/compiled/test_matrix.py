"""Compiled models train on slots as they do without the compiler, in both forms that replicate, and are compiled once.

Each way to compile is met by each model. In float64 to 1e-9, or 1e-7 where Inductor generates the code, which may
compute a sum in another order. Models that are divided are in forms/test_fully_shard_compiled.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from compiled_backends import Counting
from compiled_models import MODELS
from dataparallel.compiled import counts
from dataparallel.testing.cases import Batch, adamw
from each_form import FORMS
from sharded_steps import Model, Trained, assert_same, moved, on_device, train

pytestmark = pytest.mark.watchdog(900)

REPLICATING = ("DataParallel", "replicate")
WAYS = ("argument", "before", "blocks")
"""What is compiled, and when: the model by an argument of the form, the model before, or each of its blocks before."""

COUNTS = (2, 3, 8)


def covering() -> list[Any]:
    """A form, a way, a number of slots and a model."""
    return [
        pytest.param(REPLICATING[(k + m) % 2], way, COUNTS[(k + m) % 3], name, id=f"{name}-{way}")
        for m, name in enumerate(MODELS)
        for k, way in enumerate(WAYS)
    ]


def compiled(form: str, way: str, model: Any, slots: list, **options: Any) -> Any:
    """The wrapper takes what ``torch.compile`` returns. `replicate` takes a model that is compiled in place."""
    if way == "argument":
        return FORMS[form](model, slots, compile=options)
    if (form, way) == ("DataParallel", "before"):
        return FORMS[form](torch.compile(model, **options), slots)
    for module in model.units() if way == "blocks" else [model]:
        module.compile(**options)
    return FORMS[form](model, slots)


def batches(model: Model, slots: list) -> Iterator[Batch]:
    """Epochs of two batches. The last one is smaller and cannot be divided evenly.

    No chunk has a single sample, for which compilers make code of its own, or as many as another dimension has: the
    compiler would take both for one size that varies.
    """
    for step in range(20):
        yield moved(model.batch(10 * len(slots) - 1 if step % 2 else 12 * len(slots), step), slots[0])


def trained(called: nn.Module, model: Model, slots: list, steps: int) -> tuple[list[Any], list[int]]:
    """What was computed in the first epoch and then, and how many graphs had been compiled after each."""
    before, optimizer, following = counts(), adamw(called.parameters()), batches(model, slots)
    found, compilations = [], []
    for count in (2, steps - 2):
        found.append(train(called, following, optimizer, count))
        compilations.append((counts() - before).total)
        assert not (counts() - before).eager
    return found, compilations


def without_names(found: Trained) -> Any:
    """``torch.compile(model)`` changes those of parameters."""
    return replace(found, gradients=[[*each.values()] for each in found.gradients], state=[*found.state.values()])


def check(
    form: str, way: str, slots: list, name: str, *, steps: int, counting: Counting | None = None, on_one: int = 99
) -> None:
    """Without ``counting``, Inductor compiles.

    The first epoch compiles on each device at most ``on_one`` graphs, and later ones compile nothing.
    """
    torch._dynamo.reset()
    model, devices = MODELS[name], {torch.device(slot) for slot in slots}
    several, plain = (on_device(model.build, slots[0]) for _ in range(2))
    calls = len(several.units()) if way == "blocks" else 1
    called = compiled(form, way, several, slots, backend=counting or "inductor")
    ours, compilations = trained(called, model, slots, steps)
    theirs, _ = trained(FORMS[form](plain, slots), model, slots, steps)
    for found, expected in zip(ours, theirs, strict=True):
        assert_same(without_names(found), without_names(expected), atol=1e-9 if counting else 1e-7)
    assert 0 < compilations[0] == compilations[1] <= on_one * len(devices)
    if counting:
        assert counting.by_device().keys() == devices
        assert len(counting.compiled) == compilations[0]
        assert max(counting.by_device().values()) <= on_one
        assert counting.lowered.count(True) == counting.lowered.count(False) == len(counting.compiled)
        counting.forget_runs()
        train(called, batches(model, slots), steps=1)
        expected_runs = Counter([torch.device(slot) for slot in slots] * calls)
        assert Counter(counting.forwards) == Counter(counting.backwards) == expected_runs


@pytest.mark.few(1)
@pytest.mark.slots(2)
@pytest.mark.parametrize(
    ("form", "way"), [("DataParallel", "argument"), ("replicate", "before"), ("replicate", "blocks")]
)
def test_a_few_steps(form: str, way: str, slots: list) -> None:
    """The whole model has a graph for the first chunks, and one for any size. Its blocks differ in another size too."""
    check(form, way, slots, "resnet", on_one=3 if way == "blocks" else 2, steps=4, counting=Counting())


@pytest.mark.long
@pytest.mark.parametrize(("form", "way", "slots", "name"), covering(), indirect=["slots"])
def test_twenty_steps(form: str, way: str, slots: list, name: str, request: pytest.FixtureRequest) -> None:
    """Inductor compiles for CPU slots. It does not know simulated devices."""
    counting = None if request.config.getoption("--devices") == "cpu" else Counting()
    check(form, way, slots, name, steps=20, counting=counting)
