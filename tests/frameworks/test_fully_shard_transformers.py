"""GPT-2 and Llama of transformers, small and with random weights, train sharded as on one device."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny import VOCABULARY, gpt2
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import sharded_steps
from dataparallel.composable import fully_shard
from dataparallel.testing.cases import Batch
from sharded_steps import Model, assert_same, on_device, train

STEPS = 5


def llama() -> nn.Module:
    """Two layers of width 16, with fewer key heads than query heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).double()


MODELS = {"gpt2": gpt2, "llama": llama}


def layers(model: nn.Module) -> list[nn.Module]:
    return [*(model.model.layers if isinstance(model, LlamaForCausalLM) else model.transformer.h)]


def padded(size: int, seed: int) -> Batch:
    """Token numbers, of which every second sample lacks the last two."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(size, 6, dtype=torch.int64)
    mask[::2, -2:] = 0
    words = torch.randint(1, VOCABULARY, (size, 6), generator=generator)
    return (), {"input_ids": words, "attention_mask": mask}


class ByChunks:
    """A model on one device that computes a batch as slots do: a kernel for the whole batch may round otherwise."""

    def __init__(self, model: nn.Module, slots: int) -> None:
        self.model, self.slots = model, slots
        for name in ("parameters", "named_parameters", "named_buffers"):
            setattr(self, name, getattr(model, name))

    def __call__(self, **batch: Tensor) -> Tensor:
        chunks = zip(*(value.chunk(self.slots) for value in batch.values()), strict=True)
        return torch.cat([self.model(**dict(zip(batch, chunk, strict=True))).logits for chunk in chunks])


def loss(output: object) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    targets = torch.arange(logits.numel(), dtype=logits.dtype, device=logits.device).sin().view(logits.shape)
    return (logits - targets).square().mean()


def assert_same_training(name: str, slots: list, checkpoints: bool | None = None, **options: object) -> None:
    model = Model(MODELS[name], padded)
    several, one = (on_device(model.build, slots[0]).train() for _ in range(2))
    if checkpoints is not None:
        for each in (several, one):
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
    several.units = lambda: layers(several)
    sharded_steps.sharded(several, slots, **options)
    sharded_steps.assert_all_sharded(several)
    ours = train(several, sharded_steps.batches_of(model, slots), steps=STEPS, loss=loss)
    theirs = train(ByChunks(one, len(slots)), sharded_steps.batches_of(model, slots), steps=STEPS, loss=loss)
    assert_same(ours, theirs)


@pytest.mark.slots(2, 4, long=[3, 8])
@pytest.mark.parametrize("name", MODELS)
def test_training(name, slots):
    assert_same_training(name, slots)


@pytest.mark.slots(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_training_with_checkpoints(use_reentrant, name, slots):
    assert_same_training(name, slots, use_reentrant)


@pytest.mark.slots(3)
def test_save_pretrained_saves_the_full_state(slots, tmp_path):
    model, expected = on_device(gpt2, slots[0]), gpt2()
    fully_shard(model, devices=slots)
    with pytest.raises(TypeError, match=r"model.save_pretrained\(folder, state_dict=...\)"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, state_dict=fully_shard.full_state_dict(model))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=0)
