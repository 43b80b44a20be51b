"""accelerate's `prepare` and `unwrap_model` with both forms, with mixed precision and without."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel
from either_form import both_forms, in_form
from tiny import gpt2, tokens


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def plain(root):
    return gpt2().to(root)


@pytest.fixture
def batches(root):
    return [tokens(7, seed=seed).to(root) for seed in range(3)]


def train(accelerator, model, batches):
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for ids in batches:
        with accelerator.accumulate(model):
            logits = model(input_ids=ids).logits.double()
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.fixture
def accelerator_of(root):
    """A function that makes an accelerator, on the first GPU or on the CPU."""
    is_cuda = root.type == "cuda"
    return lambda **settings: Accelerator(cpu=not is_cuda, device_placement=is_cuda, **settings)


@both_forms
@pytest.mark.slots(1, 2, 3)
class TestPrepared:
    def test_it_trains_as_one_device(self, accelerator_of, form, plain, slots, batches):
        accelerator = accelerator_of()
        trained = train(accelerator, in_form(form, plain, slots), batches)
        train(accelerator, plain, batches)
        found = accelerator.unwrap_model(trained)
        torch.testing.assert_close(found.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)


@both_forms
@pytest.mark.slots(1, 2)
@pytest.mark.devices("cpu", "cuda")  # a type that accelerate does not know has no autocast of its own there
class TestMixedPrecision:
    """`prepare` puts functions of its own around the model's ``forward``; `unwrap_model` takes them off again."""

    @pytest.fixture
    def plain(self, root):
        return gpt2().float().to(root)

    def test_it_trains_as_one_device(self, accelerator_of, form, plain, slots, batches):
        accelerator = accelerator_of(mixed_precision="bf16")
        model = train(accelerator, in_form(form, plain, slots), batches)
        seen = []
        lm_head = accelerator.unwrap_model(model, keep_fp32_wrapper=True).lm_head
        lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        assert model(input_ids=batches[0]).logits.dtype == torch.float32
        assert seen == [torch.bfloat16] * len(slots)
        train(accelerator, plain, batches)
        found = accelerator.unwrap_model(model)
        torch.testing.assert_close(found.state_dict(), plain.state_dict(), rtol=0, atol=2e-2)

    def test_unwrapped_it_computes_what_it_did(self, accelerator_of, form, plain, slots, batches):
        expected = plain(input_ids=batches[0]).logits
        model = in_form(form, plain, slots)
        accelerator = accelerator_of(mixed_precision="bf16")
        prepared = accelerator.prepare(model)
        assert not torch.equal(prepared(input_ids=batches[0]).logits, expected)
        unwrapped = extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
        torch.testing.assert_close(unwrapped(input_ids=batches[0]).logits, expected, rtol=1e-5, atol=1e-6)
