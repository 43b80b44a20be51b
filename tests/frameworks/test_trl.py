"""TRL's trainers on slots: `OnSlots` before ``SFTTrainer`` and ``DPOTrainer`` does what they do on one device."""

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from either_trainer import state_of, trainer_on
from tiny import VOCABULARY, gpt2, tokens
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from each_form import FORMS

ROWS = [row.tolist() for row in tokens(29)]
TUNING = [{"input_ids": row[: 3 + index % 4]} for index, row in enumerate(ROWS)]
PREFERENCES = [
    {"prompt": words(row[:2]), "chosen": words(row[2 : 4 + index % 2]), "rejected": words(row[4:])}
    for words in [lambda row: " ".join(f"t{number}" for number in row)]
    for index, row in enumerate(ROWS)
]


def trained(base, config, data, folder, slots=None, form=None, **settings):
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t0")
    given = {"model": gpt2(), "processing_class": tokenizer}
    given |= dict.fromkeys(["train_dataset", "eval_dataset"], Dataset.from_list(data))
    given |= {"ref_model": gpt2()} if base is DPOTrainer else {}
    usual = {"max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 0.02}
    usual |= {"bf16": False, "gradient_checkpointing": False, "arguments": config}
    trainer = trainer_on(slots, form, base, folder, given, **usual, **settings)
    trainer.train()
    logged = [
        {name: value for name, value in entry.items() if "runtime" not in name and "second" not in name}
        for entry in [*trainer.state.log_history[:-1], trainer.evaluate()]
    ]
    return logged, state_of(trainer.model)


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    """A stand-in for CUDA cannot run kernels of Triton. TRL has functions of torch that compute the same."""
    for module in ("trl.kernels.chunked_logprob", "trl.trainer.utils"):
        monkeypatch.setattr(f"{module}._use_triton", lambda device: False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("base", "config", "data", "settings"),
    [
        (SFTTrainer, SFTConfig, TUNING, {"loss_type": "nll", "max_length": 8}),
        (DPOTrainer, DPOConfig, PREFERENCES, {"max_length": 16}),
    ],
    ids=["SFT", "DPO"],
)
def test_it_trains_as_one_device(base, config, data, settings, form, slots, tmp_path):
    expected, found = (trained(base, config, data, tmp_path, *on, **settings) for on in ((), (slots, form)))
    assert len(found[0]) == 4
    for one, several in zip(expected[0], found[0], strict=True):
        assert several == pytest.approx(one, rel=1e-5, abs=1e-7)
    # The losses are computed in float32.
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)
