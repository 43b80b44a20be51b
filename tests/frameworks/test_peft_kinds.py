"""Every kind of peft's adapters is trained, saved, loaded, switched and merged as on one device."""

import copy

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import (
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from tiny import gpt2, tokens
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from dataparallel import DataParallel
from dataparallel.composable import fully_shard
from each_form import replicating_forms

LORA = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
IA3 = {"target_modules": ["c_attn", "c_fc"], "feedforward_modules": ["c_fc"], "fan_in_fan_out": True}
TASK = {"task_type": "CAUSAL_LM"}
CONFIGS = {
    "LoRA": lambda: LoraConfig(**LORA, **TASK),
    "LoRA and a trained norm": lambda: LoraConfig(**LORA, modules_to_save=["ln_f"], **TASK),
    "DoRA": lambda: LoraConfig(**LORA, use_dora=True, **TASK),
    "prefix": lambda: PrefixTuningConfig(num_virtual_tokens=3, **TASK),
    "projected prefix": lambda: PrefixTuningConfig(
        num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8, **TASK
    ),
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=3, **TASK),
    "encoded prompt": lambda: PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **TASK),
    "IA3": lambda: IA3Config(**IA3, init_ia3_weights=False, **TASK),
    "VeRA": lambda: VeraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_weights=False, **TASK),
    "norms": lambda: LNTuningConfig(target_modules=["ln_1", "ln_2"], **TASK),
}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def adapted(kind, root):
    torch.manual_seed(1)
    return get_peft_model(gpt2(), CONFIGS[kind](), autocast_adapter_dtype=False).double().to(root)


@pytest.fixture(params=CONFIGS)
def alone(request, root):
    return adapted(request.param, root)


def source(model):
    return model.module if isinstance(model, DataParallel) else model


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def train(model, ids):
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids).logits.square().mean().backward()
        optimizer.step()


@replicating_forms
def test_adapters_of_each_kind_live_as_on_one_device(form, alone, slots, root, tmp_path):
    ids = tokens(2 * len(slots) + 1).to(root)
    model = form(copy.deepcopy(alone), slots)
    ours = source(model)
    train(model, ids)
    train(alone, ids)
    torch.testing.assert_close(ours.state_dict(), alone.state_dict(), **EXACT)

    ours.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(gpt2().to(root), tmp_path, autocast_adapter_dtype=False).double()
    # peft makes prompts in float32, and loads into those.
    torch.testing.assert_close(logits(model, ids), logits(loaded, ids), rtol=1e-4, atol=1e-6)

    for each in (ours, alone):
        each.load_adapter(tmp_path, "second")
        each.double().set_adapter("second")
    train(model, ids)
    train(alone, ids)
    torch.testing.assert_close(logits(model, ids), logits(alone, ids), **EXACT)

    with ours.disable_adapter():
        torch.testing.assert_close(logits(model, ids), logits(gpt2().to(root), ids), **EXACT)
    for each in (ours, alone):
        each.delete_adapter("second")
        each.set_adapter("default")
    torch.testing.assert_close(logits(model, ids), logits(alone, ids), **EXACT)
    if hasattr(ours.base_model, "merge_adapter"):
        ours.merge_adapter()
        torch.testing.assert_close(logits(model, ids), logits(alone, ids), **EXACT)


@pytest.mark.parametrize("kind", CONFIGS)
def test_sharded_they_are_trained_and_a_whole_model_saves_and_merges_them(kind, slots, root, tmp_path):
    ids = tokens(2 * len(slots) + 1).to(root)
    alone, model, whole = (adapted(kind, root) for _ in range(3))
    for block in (each for each in model.modules() if isinstance(each, GPT2Block)):
        fully_shard(block, devices=slots)
    fully_shard(model, devices=slots)
    train(model, ids)
    train(alone, ids)
    state = {name: each.to(root) for name, each in fully_shard.full_state_dict(model).items()}
    torch.testing.assert_close(state, dict(alone.state_dict()), **EXACT)
    torch.testing.assert_close(logits(model, ids), logits(alone, ids), **EXACT)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model, ids), logits(gpt2().to(root), ids), **EXACT)

    with pytest.raises((NotImplementedError, TypeError), match=r"does not work on sharded tensors.*full_tensor\(\)"):
        model.save_pretrained(tmp_path)
    whole.load_state_dict(state)
    whole.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(gpt2().to(root), tmp_path, autocast_adapter_dtype=False).double()
    torch.testing.assert_close(logits(model, ids), logits(loaded, ids), rtol=1e-4, atol=1e-6)
    if hasattr(whole.base_model, "merge_adapter"):
        whole.merge_adapter()
        torch.testing.assert_close(logits(model, ids), logits(whole, ids), **EXACT)


@pytest.mark.parametrize("kind", ["LoRA", "IA3", "VeRA", "norms"])
def test_an_adapter_that_comes_after_fully_shard_is_refused(kind, slots, root):
    model = fully_shard(adapted(kind, root), devices=slots)
    model.add_adapter("second", CONFIGS[kind]())
    model.double().to(root).set_adapter("second")
    with pytest.raises(RuntimeError, match=r"second.*came into the model after fully_shard. Change the model first"):
        train(model, tokens(7).to(root))


@replicating_forms
@pytest.mark.slots(2, 3)
def test_adapters_may_come_after_the_form(form, slots, root):
    """The wrapper reads the tree at each call; a replicated module keeps its form inside of peft's model."""
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = form(gpt2().to(root), slots)
    trained = []
    for base in (source(model), gpt2().to(root)):
        torch.manual_seed(1)
        trained.append(get_peft_model(base, config, autocast_adapter_dtype=False))
    ours, alone = trained
    if isinstance(model, DataParallel):
        model.module = ours
    for each in (model if isinstance(model, DataParallel) else ours, alone):
        train(each, tokens(5).to(root))
    torch.testing.assert_close([*ours.parameters()], [*alone.parameters()], **EXACT)
