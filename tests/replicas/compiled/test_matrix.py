"""Compiled models train on slots as on one device without the compiler, in each form, and are compiled once.

Each form, each way to compile, 2, 3 and 8 slots, and each model: pairs of these are covered rather than all products.
In float64 to 1e-9, or 1e-7 where Inductor generates the code, which may compute a sum in another order.
"""

from collections import Counter
from typing import Any

import pytest
import torch

from compiled_backends import Counting, ran_eagerly
from compiled_models import MODELS
from compiled_steps import (
    FORMS,
    WAYS,
    assert_same,
    calls_of_pieces,
    compiled,
    forget,
    trained,
    trained_on_one_device,
)
from sharded_steps import on_device

pytestmark = pytest.mark.watchdog(900)

COUNTS = (2, 3, 8)


def covering() -> list[Any]:
    """A form, a way, a number of slots and a model, such that any two values of different kinds meet at least once.

    The models make a Latin square of order 3, in which each pair of the other kinds meets.
    """
    forms = list(FORMS)
    rows = [
        (forms[k], WAYS[(k + m) % 3], COUNTS[(k + 2 * m) % 3], name) for m, name in enumerate(MODELS) for k in range(3)
    ]
    return [pytest.param(*row, id=f"{row[3]}-{row[0]}-{row[1]}-{row[2]}slots") for row in rows]


def check(
    form: str, way: str, slots: list, name: str, *, steps: int, counting: Counting | None = None, on_one: int = 99
) -> None:
    """Without ``counting``, Inductor compiles. The last batch of each epoch of two steps is smaller.

    The first epoch compiles on each device at most ``on_one`` graphs, and later ones compile nothing.
    """
    forget()
    model, devices = MODELS[name], {torch.device(slot) for slot in slots}
    source = on_device(model.build, slots[0])
    call = compiled(form, way, source, slots, {"backend": counting or "inductor"})
    ours = trained(call, source, model, slots, steps)
    assert 0 < ours.compilations[1] <= on_one * len(devices)
    assert ours.compilations[2:] == [ours.compilations[1]] * (steps - 2)
    assert ran_eagerly() == {}
    if counting:
        assert counting.by_device().keys() == devices
        assert max(counting.by_device().values()) <= on_one
        assert counting.lowered.count(True) == counting.lowered.count(False) == len(counting.compiled)
        counting.forget_runs()
        trained(call, source, model, slots, 1)
        expected = Counter([torch.device(slot) for slot in slots] * calls_of_pieces(form, way, model))
        assert Counter(counting.forwards) == Counter(counting.backwards) == expected
    assert_same(ours, trained_on_one_device(model, slots, steps), atol=1e-9 if counting else 1e-7)


@pytest.mark.few(1)
@pytest.mark.slots(2)
@pytest.mark.parametrize(("form", "way"), [*zip(FORMS, WAYS, strict=True)])
def test_a_few_steps(form: str, way: str, slots: list) -> None:
    """The whole model has a graph for the first chunks, and one for any size. Its blocks differ in another size too."""
    check(form, way, slots, "resnet", on_one=3 if way == "blocks" else 2, steps=4, counting=Counting())


@pytest.mark.long
@pytest.mark.parametrize(("form", "way", "slots", "name"), covering(), indirect=["slots"])
def test_twenty_steps(form: str, way: str, slots: list, name: str, request: pytest.FixtureRequest) -> None:
    """Inductor compiles for CPU slots. It does not know simulated devices."""
    counting = None if request.config.getoption("--devices") == "cpu" else Counting()
    check(form, way, slots, name, steps=20, counting=counting)
