"""Mixed precision with captured graphs: the same values as without, also where the gradient scaler skips a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dataparallel.testing.cases import Batch
from dataparallel.testing.steps import mean_square_loss
from graphed_models import FORMS, MODELS, made, values
from graphed_nets import captured, reasons
from sharded_steps import Model, moved, whole

pytestmark = pytest.mark.devices("cuda")

STEPS, OVERFLOW = 10, 6


def in_float(model: Model) -> Model:
    """The same model and batches in single precision."""

    def batch(size: int, seed: int) -> Batch:
        found: Batch = tree_map(
            lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
            model.batch(size, 2 * seed),
        )
        return found

    return Model(lambda: model.build().float(), batch)


def train(model: Model, form: Any, slots: list, dtype: torch.dtype, overflow: str, **options: Any) -> tuple[Any, Any]:
    """Trains with a gradient scaler. Returns losses, scales and the values at the end, and the model.

    ``overflow``: where it is in one step, in the "input" or in the "scale".
    """
    source, network = made(in_float(model), form, slots, **options)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=4)
    found: list[Any] = []
    for number in range(STEPS):
        optimizer.zero_grad()
        args, kwargs = moved(in_float(model).batch(3 * len(slots), number), slots[0])
        if number == OVERFLOW and overflow == "input":
            args[0][0].view(-1)[0] = float("inf")
        if number == OVERFLOW and overflow == "scale":
            scaler.update(float("inf"))
        with torch.autocast("cuda", dtype=dtype):
            output = network(*args, **kwargs)
        loss = mean_square_loss(output)
        scaler.scale(loss).backward()
        before = values(source)
        scaler.step(optimizer)
        is_skipped = all(torch.equal(value, before[name]) for name, value in values(source).items())
        assert is_skipped == (number == OVERFLOW), number
        scaler.update(256.0 if is_skipped and overflow == "scale" else None)
        found += [whole(loss), scaler.get_scale()]
    return {"computed": found, "state": values(source)}, network


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("model", "overflow"), [("gpt", "scale"), ("structures", "input")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_training_computes_exactly_the_same(
    dtype: torch.dtype, model: str, overflow: str, form: str, slots: list
) -> None:
    expected, _ = train(MODELS[model], FORMS[form], slots, dtype, overflow)
    found, network = train(MODELS[model], FORMS[form], slots, dtype, overflow, graphs=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert captured(network) >= (STEPS - 3) * len(slots)
    assert not reasons(network)
