"""accelerate's `Accelerator` with its own placement on one GPU: `prepare` before the forms, and after them."""

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from either_form import both_forms, in_form
from tiny import gpt2, tokens

pytestmark = pytest.mark.devices("cuda")


@pytest.fixture
def accelerator():
    yield Accelerator()
    AcceleratorState._reset_state(reset_partial_state=True)


def train(accelerator, model, optimizer):
    """Some steps on the batches of a prepared loader. Returns what the model has learned, on the CPU."""
    loader = accelerator.prepare(DataLoader(tokens(14), batch_size=7))
    assert accelerator.num_processes == 1
    for ids in loader:
        assert ids.device == torch.device("cuda", 0)
        logits = model(input_ids=ids).logits
        accelerator.backward(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.unwrap_model(model).state_dict()
    return {name: value.cpu() for name, value in state.items()}


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def expected():
    """What the model learns of the same batches without accelerate, on the CPU."""
    model = gpt2()
    optimizer = optimizer_of(model)
    for ids in tokens(14).split(7):
        logits = model(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_plain_model_is_moved(accelerator, expected):
    model = gpt2()
    assert_same(train(accelerator, *accelerator.prepare(model, optimizer_of(model))), expected)


@both_forms
def test_prepared_after_the_form(form, slots, accelerator, expected):
    model = in_form(form, gpt2().to(slots[0]), slots)
    assert_same(train(accelerator, *accelerator.prepare(model, optimizer_of(model))), expected)


@both_forms
def test_prepared_before_the_form(form, slots, accelerator, expected):
    model = in_form(form, accelerator.prepare(gpt2()), slots)
    assert_same(train(accelerator, model, accelerator.prepare(optimizer_of(model))), expected)
