"""LoRA adapters of peft: only they are trained, and as on one device."""

import copy

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from either_form import both_forms, in_form
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import gpt2, tokens


def with_adapters():
    torch.manual_seed(1)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(gpt2(), config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first, so that the other half would get no gradients
            torch.nn.init.normal_(parameter)
    return model


def adapters(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(input_ids=batch).logits.flatten(0, 1), batch.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


@both_forms
@pytest.mark.slots(1, 2, 3)
def test_adapters_are_trained_as_on_one_device(form, slots, root):
    alone = with_adapters().to(root)
    model = in_form(form, alone, slots)
    before = copy.deepcopy(alone.state_dict())
    for seed in range(3):
        losses = [
            step(each, torch.optim.SGD(adapters(each).values(), lr=0.1), tokens(7, seed=seed).to(root))
            for each in (alone, model)
        ]
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    trained = (model.module if form == "DataParallel" else model).state_dict()
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-9, atol=1e-9)
        assert torch.equal(expected, before[name]) == ("lora" not in name)


@both_forms
def test_adapters_are_saved_loaded_and_merged(form, slots, root, tmp_path):
    model = in_form(form, with_adapters().to(root), slots)
    step(model, torch.optim.SGD(adapters(model).values(), lr=0.1), tokens(5).to(root))
    source = model.module if form == "DataParallel" else model
    source.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(gpt2().to(root), tmp_path, autocast_adapter_dtype=False).double()
    batch = tokens(4, seed=3).to(root)
    expected = loaded(input_ids=batch).logits
    torch.testing.assert_close(model(input_ids=batch).logits, expected, rtol=1e-9, atol=1e-9)
    merged = in_form(form, loaded.merge_and_unload(), slots)
    torch.testing.assert_close(merged(input_ids=batch).logits, expected, rtol=1e-9, atol=1e-9)


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
        step(each, torch.optim.SGD(adapters(each).values(), lr=0.1), tokens(5).to(root))
    for found, expected in zip(adapters(ours).values(), adapters(alone).values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
