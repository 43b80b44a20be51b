"""`OnSlots`: a ``Trainer`` on slots does what the same ``Trainer`` does on one device, in each of the three forms."""

import json

import numpy
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from either_trainer import losses_of, state_of, trainer_on
from tiny import bert, examples, gpt2, t5, tokens
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dataparallel import DataParallel
from dataparallel.composable import FullyShardedModule, ReplicatedModule, fully_shard, replicate
from dataparallel.integrations.transformers import OnSlots
from each_form import FORMS

STEPS = 6
all_forms = pytest.mark.parametrize("form", FORMS)
GIVEN = ("train_dataset", "eval_dataset", "model_init", "data_collator", "scalars")


def data(samples):
    """Rows with different numbers of labels that count. The first sample has none."""
    found = examples(samples)
    for index, example in enumerate(found):
        example["labels"][: 6 if index == 0 else index % 4] = -100
    return found


def trainer_for(model, folder, slots=None, form=None, trainer=Trainer, **settings):
    """One on slots or, without slots, on one device with the same batches. The last batch of an epoch is smaller."""
    given = {"model": model, "train_dataset": data(29), "eval_dataset": data(10)}
    given |= {name: settings.pop(name) for name in GIVEN if name in settings}
    usual = {"max_steps": STEPS, "save_steps": STEPS // 2, "gradient_accumulation_steps": 2, "learning_rate": 0.02}
    return trainer_on(slots, form, trainer, folder, given, **{**usual, **settings})


def trained(*args, resume=None, **settings):
    trainer = trainer_for(*args, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same(trainer, expected, tolerance=1e-9):
    """That both logged the same losses, and have learned the same."""
    assert losses_of(trainer) == pytest.approx(losses_of(expected), rel=1e-6)
    found, expected = state_of(trainer.model), state_of(expected.model)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def one_device(request, tmp_path_factory):
    return trained(gpt2(), tmp_path_factory.mktemp("one"))


@all_forms
class TestTraining:
    def test_it_learns_goes_on_from_a_checkpoint_and_saves_a_plain_model(self, form, slots, one_device, tmp_path):
        trainer = trained(gpt2(), tmp_path, slots, form)
        assert len(losses_of(trainer)) == STEPS
        assert not torch.equal(state_of(trainer.model)["lm_head.weight"], gpt2().lm_head.weight)
        assert_same(trainer, one_device)
        checkpoint = str(tmp_path / f"checkpoint-{STEPS // 2}")
        assert_same(trained(gpt2(), tmp_path, slots, form, resume=checkpoint), one_device)
        assert_same(trained(gpt2(), tmp_path, resume=checkpoint), one_device)
        trainer.save_model(tmp_path / "saved")
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert config["architectures"] == ["GPT2LMHeadModel"]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
        assert type(loaded) is GPT2LMHeadModel
        torch.testing.assert_close(loaded.state_dict(), state_of(one_device.model), rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize(
        "settings",
        [
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "learning_rate": 0.1},
            {"label_smoothing_factor": 0.1},  # the trainer chooses by the name of the model's class
            {"gradient_checkpointing": True},
        ],
        ids=lambda settings: next(iter(settings)),
    )
    def test_settings_that_look_at_the_model(self, form, slots, settings, tmp_path):
        one = trained(gpt2(), tmp_path / "one", **settings)
        several = trained(gpt2(), tmp_path / "several", slots, form, **settings)
        assert (several.state.best_metric or 0) == pytest.approx(one.state.best_metric or 0, rel=1e-6)
        assert_same(several, one)

    def test_gradients_wait_on_their_slots_until_the_last_batch_of_a_step(self, form, slots, tmp_path):
        gradients = []

        class Look(TrainerCallback):
            def on_substep_end(self, args, state, control, model, **kwargs):
                gradients.append(model.lm_head.weight.grad)
                control.should_training_stop = True

        for on in ((), (slots, form)):
            trainer = trainer_for(gpt2(), tmp_path, *on)
            trainer.add_callback(Look)
            trainer.train()
        expected, found = gradients
        is_complete = found is not None and torch.allclose(found.cpu(), expected.cpu())
        assert is_complete == (form == "DataParallel")

    @pytest.mark.parametrize(("make", "divides"), [("bert", False), ("bert", True), ("gpt2", True)])
    def test_losses_that_are_means(self, form, slots, make, divides, tmp_path):
        """BERT does not use ``num_items_in_batch``. Where a model says so, the trainer divides by the batches."""
        settings = {"optim": "sgd"}
        if make == "bert":
            settings |= {"train_dataset": classified(29), "eval_dataset": classified(10)}
        trainers = []
        for on in ((), (slots, form)):
            model = bert() if make == "bert" else gpt2()
            if divides:
                model.accepts_loss_kwargs = False
            trainers.append(trained(model, tmp_path, *on, **settings))
        one, several = trainers
        # GPT-2 computes a mean in float32: those of the chunks are rounded.
        assert_same(several, one, tolerance=1e-9 if make == "bert" else 1e-7)
        assert several.evaluate()["eval_loss"] == pytest.approx(one.evaluate()["eval_loss"], rel=1e-6)


def classified(samples):
    return [{**each, "labels": index % 3} for index, each in enumerate(examples(samples))]


@all_forms
class TestEvaluation:
    """With a last batch that is smaller, and smaller than the number of slots."""

    @pytest.mark.parametrize("samples", [10, 7])
    def test_losses_and_predictions(self, form, slots, samples, tmp_path):
        several = trainer_for(gpt2(), tmp_path, slots, form)
        assert several.label_names == ["labels"]
        found, expected = (trainer.predict(data(samples)) for trainer in (several, trainer_for(gpt2(), tmp_path)))
        assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)
        numpy.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-9, atol=1e-9)
        numpy.testing.assert_array_equal(found.label_ids, expected.label_ids)

    def test_generation(self, form, slots, tmp_path):
        """The sequences of each chunk have another length."""
        rows = tokens(7, 6)[[0, 4, 1, 5, 2, 6]]
        written = [{"input_ids": row, "labels": torch.tensor([3, 4, -100])} for row in rows]
        settings = {"arguments": Seq2SeqTrainingArguments, "predict_with_generate": True}
        expected, several = (
            trainer_for(t5(), tmp_path, *on, trainer=Seq2SeqTrainer, **settings).predict(written, max_new_tokens=10)
            for on in ((), (slots, form))
        )
        lengths = (expected.predictions != 0).sum(1)
        assert len({*lengths.reshape(3, 2).max(1)}) == 3
        numpy.testing.assert_array_equal(several.predictions, expected.predictions)
        assert several.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)


class SlotsTrainer(OnSlots, Trainer):
    pass


class TestModels:
    @all_forms
    def test_one_that_has_a_form(self, form, slots, one_device, tmp_path):
        plain = gpt2()
        settings = {"trainer": SlotsTrainer, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
        trainer = trainer_for(FORMS[form](plain, slots), tmp_path, **settings)
        trainer.train()
        assert trainer.model is plain
        assert trainer.args.n_gpu == 3
        assert_same(trainer, one_device)

    def test_one_that_has_a_form_has_no_other_form_or_slots(self, slots, tmp_path):
        with pytest.raises(ValueError, match=r"has a form and slots already, 'DataParallel' on .* scalars=None"):
            trainer_for(DataParallel(gpt2(), slots), tmp_path, slots, "replicate")
        model = replicate(gpt2(), devices=slots)
        for others in ((slots[:2], "replicate"), (slots, "fully_shard")):
            with pytest.raises(ValueError, match="has a form and slots already, 'replicate' on "):
                trainer_for(model, tmp_path, *others)

    @pytest.mark.parametrize("form", ["replicate", "fully_shard"])
    @pytest.mark.parametrize("scalars", [None, "sum"])
    def test_another_trainer_with_the_same_settings_goes_on(self, form, scalars, slots, tmp_path):
        settings = {"slots": slots, "form": form, "scalars": scalars}
        model = trainer_for(gpt2(), tmp_path, **settings).model
        again = trainer_for(model, tmp_path, **settings)
        assert again.model is model
        with pytest.raises(ValueError, match="has a form and slots already"):
            trainer_for(model, tmp_path, **{**settings, "scalars": "mean"})

    @pytest.mark.devices("cuda")
    def test_cpu_slots_need_arguments_for_the_cpu(self, tmp_path):
        with pytest.raises(ValueError, match=r"are CPU slots, .* on cuda:0: pass TrainingArguments\(use_cpu=True\)"):
            trainer_for(gpt2(), tmp_path, ["cpu"] * 2)

    def test_a_form_has_one_of_three_names(self, slots, tmp_path):
        with pytest.raises(ValueError, match="form='dp': expected 'replicate', 'DataParallel', 'fully_shard'"):
            trainer_for(gpt2(), tmp_path, slots, "dp")

    @all_forms
    def test_those_of_a_function(self, form, slots, tmp_path):
        one = trained(None, tmp_path, model_init=gpt2)
        several = trained(None, tmp_path, slots, form, model_init=gpt2)
        assert_same(several, one)
        assert isinstance(several.model_wrapped, (DataParallel, ReplicatedModule, FullyShardedModule))

    def test_without_accelerators_nothing_changes(self, one_device, monkeypatch):
        monkeypatch.setattr("dataparallel.devices.all_devices", list)
        trainer = SlotsTrainer(gpt2(), one_device.args, train_dataset=data(29))
        trainer.train()
        assert not isinstance(trainer.model, ReplicatedModule)
        assert_same(trainer, one_device)


@all_forms
@pytest.mark.devices("cpu", "cuda")  # accelerate has no autocast for simulated devices
def test_mixed_precision_reaches_the_replicas(form, slots, tmp_path):
    trainer = trainer_for(gpt2().float(), tmp_path, slots, form, bf16=True, max_steps=2)
    seen = []
    trainer.model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    trainer.train()
    assert {*seen} == {torch.bfloat16}


def test_save_pretrained_of_a_sharded_model_takes_its_full_state(slots, root, tmp_path):
    model, expected = gpt2().to(root), gpt2()
    fully_shard(model, devices=slots)
    with pytest.raises(TypeError, match=r"model.save_pretrained\(folder, state_dict=...\)"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, state_dict=fully_shard.full_state_dict(model))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=0, atol=0)


class OneNumber(Trainer):
    """For a wrapper that the user makes: each replica needs the number that is in a row for each GPU."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch[0, 0]
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.devices("cuda")
@pytest.mark.apart(2)
def test_a_trainer_of_all_gpus_without_it_does_not_wrap_a_wrapper_again(tmp_path):
    gpus = torch.cuda.device_count()
    model = DataParallel(gpt2().to("cuda:0"))
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "all"),
        per_device_train_batch_size=2,
        remove_unused_columns=False,  # it would look at the signature of the wrapper's forward
        **{"max_steps": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.02, "logging_steps": 1},
        **{"report_to": [], "disable_tqdm": True, "label_names": ["labels"], "save_strategy": "no"},
    )
    assert arguments.n_gpu == gpus
    found = OneNumber(model, arguments, train_dataset=examples(8 * gpus))
    found.train()
    assert found.model_wrapped is model
    settings = {"max_steps": 4, "per_device_train_batch_size": 2 * gpus, "train_dataset": examples(8 * gpus)}
    expected = trained(gpt2(), tmp_path / "one", **settings)
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-6)
    torch.testing.assert_close(state_of(model.module), state_of(expected.model), rtol=1e-9, atol=1e-9)
