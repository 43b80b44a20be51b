"""transformers' `Trainer` over both forms: the losses, the model and what is saved are those of one device."""

import json

import numpy
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from either_form import both_forms, in_form
from tiny import VOCABULARY, examples, gpt2
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, Trainer, TrainingArguments

from dataparallel import DataParallel

STEPS = 4


class Arguments(TrainingArguments):
    """The model is where its slots are, whatever device the trainer takes for its own."""

    place_model_on_device = False


class SlotsTrainer(Trainer):
    """What a user adds: losses of the replicas become one. While it trains each is divided by all tokens already."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss.mean() if num_items_in_batch is None else loss.sum()
        return (loss, outputs) if return_outputs else loss


def trainers_device(slots):
    """A trainer is on the first GPU. It knows no simulated device: then it is on the CPU."""
    return torch.device("cuda:0" if torch.device(slots[0]).type == "cuda" else "cpu")


def trainer_for(model, folder, trainer=SlotsTrainer, **settings):
    arguments = Arguments(
        use_cpu=next(model.parameters()).device.type != "cuda",
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=6,
        per_device_eval_batch_size=6,
        gradient_accumulation_steps=2,
        learning_rate=0.02,
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to=[],
        disable_tqdm=True,
        label_names=["labels"],  # the trainer looks for them at the wrapper's class
        **settings,
    )
    arguments._n_gpu = 1  # with more it wraps the model in torch.nn.DataParallel
    made = trainer(model=model, args=arguments, train_dataset=examples(36), eval_dataset=examples(6))
    made.accelerator.device_placement = False  # it would move the model too
    return made


def on_slots(form, slots):
    """The form, with its outputs where the trainer expects them."""
    return in_form(form, gpt2().to(slots[0]), slots, output_device=trainers_device(slots))


def module_of(model):
    return model.module if isinstance(model, DataParallel) else model


def state_of(model):
    return {name: value.cpu().clone() for name, value in module_of(model).state_dict().items()}


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_state(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def one_device(request, tmp_path_factory):
    """A trainer that has trained one model on the device that is its own."""
    device = "cuda:0" if request.config.getoption("--devices") == "cuda" else "cpu"
    trainer = trainer_for(gpt2().to(device), tmp_path_factory.mktemp("one"), Trainer)
    trainer.train()
    return trainer


@pytest.mark.slots(2, 3, long=[4])
@both_forms
class TestTraining:
    def test_losses_and_parameters(self, form, slots, one_device, tmp_path):
        model = on_slots(form, slots)
        before = state_of(model)
        trainer = trainer_for(model, tmp_path)
        trainer.train()
        assert losses_of(trainer) == pytest.approx(losses_of(one_device), rel=1e-6)
        assert losses_of(trainer)[-1] < losses_of(trainer)[0]
        assert_same_state(state_of(model), state_of(one_device.model))
        assert not torch.equal(state_of(model)["lm_head.weight"], before["lm_head.weight"])

    def test_evaluation(self, form, slots, one_device, tmp_path):
        model = on_slots(form, slots)
        module_of(model).load_state_dict(one_device.model.state_dict())
        found = trainer_for(model, tmp_path).evaluate()["eval_loss"]
        assert found == pytest.approx(one_device.evaluate()["eval_loss"], rel=1e-6)

    def test_predictions(self, form, slots, one_device, tmp_path):
        model = on_slots(form, slots)
        module_of(model).load_state_dict(one_device.model.state_dict())
        # A trainer asks the model's configuration what is no prediction, and the wrapper has none.
        found, expected = (
            trainer.predict(examples(6), ignore_keys=["past_key_values", "cache"]).predictions
            for trainer in (trainer_for(model, tmp_path), one_device)
        )
        assert found.shape == (6, 6, VOCABULARY)
        numpy.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


class WrappedByTheTrainer(SlotsTrainer):
    """A trainer of the plain model, which puts the wrapper around it as it would put torch's."""

    slots = ()

    def _wrap_model(self, model, training=True, dataloader=None):
        return DataParallel(model, self.slots, output_device=trainers_device(self.slots))


def trainer_of_a_transformer(form, slots, folder, **settings):
    """One whose model is of transformers' own classes, in both forms: it saves as one device does."""
    if form == "replicate":
        return trainer_for(on_slots(form, slots), folder, **settings)
    trainer = trainer_for(gpt2().to(slots[0]), folder, WrappedByTheTrainer, **settings)
    trainer.slots = slots
    return trainer


class TestSaving:
    @both_forms
    def test_what_is_saved_loads_into_a_plain_model(self, form, slots, one_device, tmp_path):
        trainer = trainer_of_a_transformer(form, slots, tmp_path)
        trainer.train()
        trainer.save_model(tmp_path / "saved")
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert config["architectures"] == ["GPT2LMHeadModel"]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
        assert type(loaded) is GPT2LMHeadModel
        assert_same_state(state_of(loaded), state_of(one_device.model))

    @both_forms
    def test_training_goes_on_from_a_checkpoint(self, form, slots, one_device, tmp_path):
        trainer_of_a_transformer(form, slots, tmp_path).train()
        trainer = trainer_of_a_transformer(form, slots, tmp_path)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
        assert trainer.state.global_step == STEPS
        assert_same_state(state_of(trainer.model), state_of(one_device.model))

    def test_a_wrapper_that_is_the_trainers_model(self, slots, one_device, tmp_path):
        # What the trainer itself writes has the wrapper's names, as with torch's; the module writes its own.
        model = on_slots("DataParallel", slots)
        trainer_for(model, tmp_path).train()
        model.module.save_pretrained(tmp_path / "saved")
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved", dtype=torch.float64)
        assert_same_state(state_of(loaded), state_of(one_device.model))


@both_forms
def test_labels_are_shifted_where_they_are_smoothed(form, slots, tmp_path):
    # The trainer chooses by the name of the model's class.
    plain = gpt2().to(trainers_device(slots))
    trainer_for(plain, tmp_path / "one", Trainer, label_smoothing_factor=0.1).train()
    trainer = trainer_of_a_transformer(form, slots, tmp_path / "slots", label_smoothing_factor=0.1)
    trainer.train()
    assert_same_state(state_of(trainer.model), state_of(plain))


@both_forms
def test_columns_that_the_model_takes_are_kept(form, slots, tmp_path):
    trainer = trainer_for(on_slots(form, slots), tmp_path)
    (first, *_) = trainer.get_train_dataloader()
    assert sorted(first) == ["input_ids", "labels"]
