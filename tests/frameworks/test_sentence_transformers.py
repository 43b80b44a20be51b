"""`OnSlots` with the trainer of sentence-transformers: it trains, saves and loads as on one device, in each form."""

import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")

from datasets import Dataset
from either_trainer import state_of, trainer_on
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from tiny import bert_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertModel, PreTrainedTokenizerFast

from each_form import FORMS

WORDS = ["[PAD]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]
all_forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of a tiny BERT and of a tokenizer that knows letters."""
    folder = tmp_path_factory.mktemp("bert")
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(bert_config()).save_pretrained(folder)
    return folder


def sentences(folder):
    torch.manual_seed(0)
    module = Transformer(str(folder))
    size = module.get_embedding_dimension()
    return SentenceTransformer(modules=[module, Pooling(size), Dense(size, 8)], device="cpu")


def pairs(number):
    rows = torch.randint(26, (number, 2, 4), generator=torch.Generator().manual_seed(1)).tolist()
    texts = [[" ".join(WORDS[2 + index] for index in text) for text in row] for row in rows]
    return Dataset.from_dict(
        {
            "first": [one for one, _ in texts],
            "second": [other for _, other in texts],
            "score": [(index % 3) / 2 for index in range(number)],
        }
    )


def trained(model, output, slots=None, form=None, resume=None):
    settings = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "use_cpu": True}
    settings |= {"learning_rate": 0.01, "optim": "sgd"}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    given = {"model": model, "train_dataset": pairs(20), "eval_dataset": pairs(5)}
    given["loss"] = losses.CosineSimilarityLoss(model)
    arguments = SentenceTransformerTrainingArguments
    trainer = trainer_on(slots, form, SentenceTransformerTrainer, output, given, arguments, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same(model, other):
    torch.testing.assert_close(state_of(model), state_of(other), rtol=1e-4, atol=1e-5)


@pytest.mark.devices("cpu")
@all_forms
def test_it_trains_saves_loads_the_best_and_goes_on(folder, form, slots, tmp_path, caplog):
    one = trained(sentences(folder), tmp_path / "one")
    several = trained(sentences(folder), tmp_path / "several", slots, form)
    assert "Could not load the best model" not in caplog.text
    assert several.state.best_model_checkpoint.endswith(one.state.best_model_checkpoint[-len("checkpoint-2") :])
    assert_same(several.model, one.model)

    several.save_model(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert_same(loaded, several.model)

    first = str(tmp_path / "several" / "checkpoint-2")
    assert_same(trained(sentences(folder), tmp_path / "more", slots, form, resume=first).model, one.model)
