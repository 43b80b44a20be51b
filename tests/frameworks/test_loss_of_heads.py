"""A step of `OnSlots` with each head of transformers is that of one device, or the trainer says what is not known."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from either_trainer import losses_of, state_of, trainer_on
from heads import HEADS
from tiny import bert_config
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import BertForMaskedLM, BertForSequenceClassification, Trainer
from transformers.loss.loss_utils import LOSS_MAPPING

from dataparallel import DataParallel
from dataparallel.composable import FullyShardedModule
from dataparallel.forms import unit_choice
from dataparallel.integrations.transformers import OnSlots
from dataparallel.integrations.transformers_losses import known_items
from each_form import FORMS

SAMPLES = 8
all_forms = pytest.mark.parametrize("form", FORMS)


def step(model, batch, folder, slots=None, form=None, trainer=Trainer, **given):
    """One step with the whole batch. Returns its loss, the loss of an evaluation after it, the state and warnings."""
    columns = batch(SAMPLES)
    data = [{name: value[index] for name, value in columns.items()} for index in range(SAMPLES)]
    given |= {"model": model, "train_dataset": data, "eval_dataset": data}
    settings = {"max_steps": 1, "learning_rate": 0.05, "optim": "sgd", "max_grad_norm": 0.0, "save_strategy": "no"}
    settings |= {"remove_unused_columns": False, "prediction_loss_only": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_on(slots, form, trainer, folder, given, rows=9, **settings)
        trainer.train()
        evaluated = trainer.evaluate().get("eval_loss")
    said = [str(each.message) for each in caught if "what it divides by" in str(each.message)]
    return losses_of(trainer)[0], evaluated, state_of(trainer.model), said


def assert_same(found, expected):
    assert found[:2] == pytest.approx(expected[:2], rel=1e-6)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-6, atol=1e-6)


@all_forms
@pytest.mark.parametrize("head", HEADS)
def test_a_step_is_that_of_one_device_or_the_trainer_says_so_once(head, form, slots, root, tmp_path):
    build, batch, is_known = HEADS[head]
    if "experts" in head and root.type != "cpu":
        pytest.skip("the loss of experts counts integers, which devices without hardware cannot")
    found = step(build(), batch, tmp_path, slots, form)
    assert len(found[3]) == (not is_known)
    if is_known:
        assert_same(found, step(build(), batch, tmp_path))


class Net(nn.Module):
    """Its loss ignores the class 255."""

    def __init__(self, reduction="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.reduction = nn.Linear(4, 3).double(), reduction

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": cross_entropy(logits.mT, labels, ignore_index=255, reduction=self.reduction), "logits": logits}


def batch_of_net(number):
    labels = torch.arange(number * 5).view(number, 5) % 3
    labels[: number // 2, 1:] = 255
    return {"x": torch.randn(number, 5, 4, generator=torch.Generator().manual_seed(2)).double(), "labels": labels}


class Knows(OnSlots, Trainer):
    items = None

    def loss_items(self, inputs):
        return (inputs["labels"] != 255).sum(1) if self.items is None else self.items


class TestOwnModels:
    """What the loss of somebody else's model divides by can only be given."""

    def test_nobody_knows_and_the_trainer_says_so_once(self, slots, tmp_path):
        _, _, _, [said] = step(Net(), batch_of_net, tmp_path, slots)
        assert "Net returns a loss" in said
        assert "scalars='mean'" in said
        assert "loss_items(inputs)" in said

    @all_forms
    @pytest.mark.parametrize(
        ("reduction", "given"), [("mean", {"trainer": Knows}), ("sum", {"scalars": "sum"})], ids=["a method", "sums"]
    )
    def test_what_is_given_counts(self, reduction, given, form, slots, tmp_path):
        found = step(Net(reduction), batch_of_net, tmp_path, slots, form, **given)
        assert_same(found, step(Net(reduction), batch_of_net, tmp_path))
        assert not found[3]

    def test_a_form_keeps_its_rule(self, slots, root, tmp_path):
        net = Net("sum").to(root)
        model = DataParallel(net, slots, scalars="sum")
        trainer = trainer_on(slots, "DataParallel", Trainer, tmp_path, {"model": model})
        x = {name: value.to(root) for name, value in batch_of_net(SAMPLES).items()}
        torch.testing.assert_close(trainer.model_wrapped(**x)["loss"], net(**x)["loss"])

    @pytest.mark.parametrize("items", [torch.ones(3), "tokens"])
    def test_items_that_are_none(self, items, slots, tmp_path, monkeypatch):
        monkeypatch.setattr(Knows, "items", items)
        with pytest.raises((TypeError, ValueError), match="loss_items returned"):
            step(Net(), batch_of_net, tmp_path, slots, trainer=Knows)

    def test_a_subclass_with_another_loss_is_not_known_by_its_name(self, slots, tmp_path):
        class OwnForSequenceClassification(BertForSequenceClassification):
            def forward(self, labels=None, **inputs):
                output = super().forward(**inputs)
                output.loss = output.logits.square().sum()
                return output

        model = OwnForSequenceClassification(bert_config()).double()
        *_, said = step(model, HEADS["sequence classification"].batch, tmp_path, slots)
        assert len(said) == 1

    def test_a_loss_function_that_is_given_is_not_known(self, slots, tmp_path):
        head = HEADS["image classification"]
        model = head.build()
        model.loss_function = lambda labels, logits, config, **_: logits.square().sum()
        *_, said = step(model, head.batch, tmp_path, slots)
        assert len(said) == 1


def test_other_items_than_the_labels_show_are_not_known():
    model = HEADS["image classification"].build()
    assert known_items(model, {"labels": [torch.zeros(3)]}) is None
    model.loss_function = LOSS_MAPPING["ForObjectDetection"]
    assert known_items(model, {"labels": torch.zeros(2, 3)}) is None
    head = HEADS["question answering with answers behind the text"]
    pictures = {"pixel_values": torch.zeros(SAMPLES, 3, 8, 8)}  # of which the text ends somewhere else
    assert known_items(head.build(), {**head.batch(SAMPLES), **pictures}) is None


def test_blocks_that_share_parameters_belong_to_the_rest(slots, tmp_path, monkeypatch):
    """The embeddings of BERT are a block, and its head has their weights."""
    monkeypatch.setattr(unit_choice, "_LEAST_BYTES", 1)
    model = BertForMaskedLM(bert_config())
    assert "BertEmbeddings" in model._no_split_modules
    model = trainer_on(slots, "fully_shard", Trainer, tmp_path, {"model": model}).model
    units = [name for name, module in model.named_modules() if isinstance(module, FullyShardedModule)]
    assert units == ["", "bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
