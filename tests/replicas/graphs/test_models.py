"""Models of many kinds train with captured graphs as they do without, in each form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sharded_steps
from graphed_models import FORMS, MODELS, train
from graphed_nets import captured, reasons

pytestmark = pytest.mark.devices("cuda")

STEPS = 20


def runs() -> Iterator[Any]:
    """Each model in each form on each number of slots. One run for each model is short."""
    for i, model in enumerate(MODELS):
        for j, form in enumerate(FORMS):
            for count in (1, 2, 3, 8):
                is_short = i % len(FORMS) == j and count == 1 + (i + i // 3) % 3
                yield pytest.param(model, form, count, marks=[] if is_short else pytest.mark.long)


@pytest.mark.parametrize(("model", "form", "slots"), [*runs()], indirect=["slots"])
def test_a_training_computes_the_same(model: str, form: str, slots: list) -> None:
    expected, _ = train(MODELS[model], FORMS[form], slots, STEPS)
    found, network = train(MODELS[model], FORMS[form], slots, STEPS, graphs=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if model != "lstm and gru":
        assert captured(network) > 0.7 * STEPS * len(slots)
        assert not reasons(network)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints(is_reentrant: bool, form: str, slots: list) -> None:
    """Reentrant ones do not go together with `torch.autograd.grad`, which a capture calls."""
    case = sharded_steps.MODELS["gpt, " + "reentrant " * is_reentrant + "checkpoints inside units"]
    expected, _ = train(case, FORMS[form], slots, STEPS)
    found, network = train(case, FORMS[form], slots, STEPS, graphs=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert bool(reasons(network)) == is_reentrant
    assert is_reentrant or captured(network) > 0.7 * STEPS * len(slots)


@pytest.mark.parametrize("form", FORMS)
def test_why_no_module_is_captured_is_said_once(form: str, slots: list, caplog: pytest.LogCaptureFixture) -> None:
    _, network = train(MODELS["lstm and gru"], FORMS[form], slots, 8, graphs=True)
    reason = "parts.0.layers is an LSTM, whose class makes its replicas itself"
    assert reasons(network) == {reason}
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"replicas run without a graph: {reason}"]
