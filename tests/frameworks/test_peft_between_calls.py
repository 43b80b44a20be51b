"""Adapters of peft come and go between calls; put around a wrapped model, they are those of one device too."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from either_form import both_forms, in_form
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import gpt2, tokens

from dataparallel import DataParallel

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def with_lora(model):
    """With random weights in both factors: by default one of them is 0, and the other has no gradient."""
    torch.manual_seed(1)
    settings = LoraConfig(
        r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True, init_lora_weights=False
    )
    return get_peft_model(model, settings).double()


def inner(model):
    return model.module if isinstance(model, DataParallel) else model


def logits_of(model, ids):
    return model(input_ids=ids).logits


def gradients(model, ids):
    logits_of(model, ids).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def train(model, ids):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        gradients(model, ids)
        optimizer.step()


@pytest.fixture
def base(root):
    return gpt2().to(root)


@pytest.fixture
def plain(root):
    return with_lora(gpt2().to(root))


@pytest.fixture
def ids(root):
    return tokens(7).to(root)


@both_forms
@pytest.mark.slots(1, 2, 3)
class TestBetweenCalls:
    def test_loaded_adapters_are_used_from_the_next_call(self, form, plain, slots, ids, tmp_path):
        model = in_form(form, plain, slots).eval()
        with torch.no_grad():
            before = logits_of(model, ids)
        train(plain, ids)
        plain.save_pretrained(tmp_path)
        inner(model).load_adapter(tmp_path, "trained")
        inner(model).double().set_adapter("trained")
        with torch.no_grad():
            found = logits_of(model, ids)
        assert not torch.allclose(found, before)
        torch.testing.assert_close(found, logits_of(plain, ids), **EXACT)

    def test_without_the_adapter_it_is_the_base_model(self, form, plain, base, slots, ids):
        model = in_form(form, plain, slots)
        with inner(model).disable_adapter():
            torch.testing.assert_close(logits_of(model, ids), logits_of(base, ids), **EXACT)
        torch.testing.assert_close(logits_of(model, ids), logits_of(plain, ids), **EXACT)


@both_forms
@pytest.mark.slots(1, 2, 3)
class TestAdaptersIntoAWrappedModel:
    def test_gradients_are_those_of_one_device(self, form, plain, base, slots, ids):
        model = with_lora(in_form(form, base, slots))
        torch.testing.assert_close(gradients(model, ids), gradients(plain, ids), **EXACT)

    def test_it_is_split(self, form, base, slots, ids):
        model, sizes = with_lora(in_form(form, base, slots)), []
        inner(model.base_model.model).lm_head.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
        model(input_ids=ids)
        assert len(sizes) == len(slots)
        assert sum(sizes) == len(ids)

    def test_merged_it_is_the_form_again(self, form, plain, base, slots, ids):
        wrapped = in_form(form, base, slots)
        merged = with_lora(wrapped).merge_and_unload()
        assert merged is wrapped
        torch.testing.assert_close(logits_of(merged, ids), logits_of(plain, ids), **EXACT)

    def test_saved_names_have_those_of_the_wrapper(self, form, base, slots, tmp_path):
        """So adapters inside of a `DataParallel` are for a `DataParallel`; a replicated model has the plain names."""
        model = with_lora(in_form(form, base, slots))
        names = [name for name, _ in model.named_parameters() if "lora_" in name]
        assert all(name.startswith("base_model.model.module.") for name in names) == (form == "DataParallel")
        model.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(in_form(form, gpt2().to(slots[0]), slots), tmp_path).double()
        torch.testing.assert_close(loaded.state_dict(), model.state_dict())


@both_forms
@pytest.mark.slots(2, 3)
def test_adapters_may_come_after_the_form(form, slots, root):
    """The wrapper reads the tree at each call; a replicated module keeps its form inside of peft's model."""
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = in_form(form, gpt2().to(root), slots)
    trained = []
    for base in (model.module if form == "DataParallel" else model, gpt2().to(root)):
        torch.manual_seed(1)
        trained.append(get_peft_model(base, config, autocast_adapter_dtype=False))
    ours, alone = trained
    if form == "DataParallel":
        model.module = ours
    for each in (model if form == "DataParallel" else ours, alone):
        train(each, tokens(5).to(root))
    torch.testing.assert_close([*ours.parameters()], [*alone.parameters()], **EXACT)
