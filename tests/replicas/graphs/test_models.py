"""Models of many kinds train with captured graphs as they do without, in each form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import sharded_steps
from dataparallel.testing.cases import seeded
from graphed_models import FORMS, MODELS, train
from graphed_nets import by_parts, captured, reasons
from selection import others_long
from sharded_models import GPT
from sharded_steps import Model

pytestmark = [pytest.mark.devices("cuda"), pytest.mark.usefixtures("one_intra_op_thread")]

STEPS = 20

# By model: which parts are captured where the whole cannot be when gradients are recorded;
# and what `fully_shard` captures.
BLOCKS = {"blocks.0", "blocks.1", "blocks.2"}
DISTANCES = {"distances.0", "distances.1"}
STACKS = {"encoder.0", "encoder.1", "decoder.0"}
LAYERS = {"layers.0", "layers.1"}
PARTS = {"parts.0", "parts.1"}
SEGMENTS: dict[str, tuple[set[str], set[str]]] = {
    "row with batch norm": (LAYERS | {"layers.2"}, LAYERS | {"layers.2"}),
    "resnet": ({"stages.0", "stages.2"}, {"stages.0", "stages.2"}),
    "gpt": (BLOCKS, BLOCKS | {"embedding", "head"}),
    "gpt with tied weights": (BLOCKS, BLOCKS),
    "bert": (LAYERS | {"pooler"}, LAYERS),
    "t5 with tied weights": (STACKS | DISTANCES, STACKS),
    "torch's encoder": ({"layers"}, {"layers.layers.0", "layers.layers.1"}),
    "lstm and gru": (set(), set()),
    "structures": (PARTS, PARTS),
    "branches": (PARTS, PARTS),
}


def runs() -> Iterator[Any]:
    """Each model in each form on each number of slots, whole and by parts. One or two runs for each model are short."""
    for i, model in enumerate(MODELS):
        for j, form in enumerate(FORMS):
            for count in (1, 2, 3, 8):
                for is_whole in (True, False):
                    is_short = (i + (not is_whole)) % len(FORMS) == j and count == 1 + (i + i // 3) % 3
                    if is_whole or form != "fully_shard":
                        yield pytest.param(model, form, is_whole, count, marks=[] if is_short else pytest.mark.long)


@pytest.mark.parametrize(("model", "form", "is_whole", "slots"), [*runs()], indirect=["slots"])
def test_a_training_computes_the_same(model: str, form: str, is_whole: bool, slots: list) -> None:
    case = MODELS[model]
    case = case if is_whole else replace(case, build=by_parts(case.build))
    expected, _ = train(case, FORMS[form], slots, STEPS)
    found, network = train(case, FORMS[form], slots, STEPS, graphs=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    of_parts, of_units = SEGMENTS[model]
    in_training = of_units if form == "fully_shard" else {""} if is_whole and of_parts else of_parts
    launches = captured(network)
    assert {*launches} - {""} == in_training - {""}
    assert ("" in launches) == (bool(in_training) and form != "fully_shard")
    assert all(launches[name] > 0.7 * STEPS * len(slots) for name in in_training), launches
    assert not in_training or not reasons(network, of_parts=not is_whole)


# What is captured in training if the model is replicated, and with `fully_shard`. Checkpoints that are reentrant do not
# go together with `torch.autograd.grad`, which a capture calls; they run their modules without gradients first.
CHECKPOINTS: dict[str, tuple[set[str], set[str]]] = {
    "gpt, checkpoints inside units": ({""}, BLOCKS),
    "gpt, checkpoints around units": ({""}, set()),
    "gpt, reentrant checkpoints inside units": (set(), set()),
    "gpt, reentrant checkpoints around units": (set(), BLOCKS),
}


@pytest.mark.parametrize("form", others_long(FORMS, ["replicate", "fully_shard"]))
@pytest.mark.parametrize("model", others_long(CHECKPOINTS, [*CHECKPOINTS][:2]))
def test_checkpoints(model: str, form: str, slots: list) -> None:
    """Inside of what is captured they are parts of the graphs. A module inside a checkpoint runs as it is."""
    case = sharded_steps.MODELS[model]
    expected, _ = train(case, FORMS[form], slots, STEPS)
    found, network = train(case, FORMS[form], slots, STEPS, graphs=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    in_training = CHECKPOINTS[model][form == "fully_shard"]
    launches = captured(network)
    assert {name for name, count in launches.items() if count > 0.7 * STEPS * len(slots)} == in_training
    if "reentrant" not in model:
        said = set() if in_training else {"hooks for saved tensors are set, as in a checkpoint"}
        assert reasons(network) == said


@pytest.mark.parametrize("form", FORMS)
def test_dropout_draws_what_it_draws_without_graphs(form: str, slots: list) -> None:
    model = Model(seeded(GPT, dropout=0.3), MODELS["gpt"].batch)

    def trained(seed: int, **options: Any) -> Any:
        found, network = train(model, FORMS[form], slots, 8, seed, **options)
        assert not options or min(captured(network).values()) > 4 * len(slots)
        return found

    found = trained(1, graphs=True)
    torch.testing.assert_close(found, trained(1), rtol=1e-9, atol=1e-9)
    assert not torch.equal(found["computed"][-1], trained(2, graphs=True)["computed"][-1])


@pytest.mark.parametrize("form", FORMS)
def test_why_no_module_is_captured_is_said_once(form: str, slots: list, caplog: pytest.LogCaptureFixture) -> None:
    _, network = train(MODELS["lstm and gru"], FORMS[form], slots, 8, graphs=True)
    reason = "parts.0.layers is an LSTM, whose class makes its replicas itself"
    assert reasons(network) == {reason}
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"the whole module runs without a graph: {reason}"]
