"""`OnSlots`: a ``Trainer`` on slots does what the same ``Trainer`` does on one device, in each of the three forms."""

import numpy
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tiny import bert, examples, gpt2, t5
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
from dataparallel.integrations.transformers import LossByItems, OnSlots

STEPS = 6
FORMS = ["DataParallel", "replicate", "fully_shard"]
all_forms = pytest.mark.parametrize("form", FORMS)


class SlotsTrainer(OnSlots, Trainer):
    pass


class SlotsSeq2SeqTrainer(OnSlots, Seq2SeqTrainer):
    pass


def data(samples):
    """Rows with different numbers of labels that count. The first sample has none."""
    found = examples(samples)
    for index, example in enumerate(found):
        example["labels"][: 6 if index == 0 else index % 4] = -100
    return found


def trainer_for(model, folder, slots=None, form=None, trainer=SlotsTrainer, arguments=TrainingArguments, **settings):
    """One on slots or, without slots, on one device with the same batches. The last batch of an epoch is smaller."""
    number = 3 if slots else 1
    settings = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.02,
        "save_steps": STEPS // 2,
        "per_device_train_batch_size": 6 // number,
        "per_device_eval_batch_size": 6 // number,
        **settings,
    }
    given = {name: settings.pop(name) for name in ("train_dataset", "eval_dataset", "model_init") if name in settings}
    args = arguments(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available() or slots == ["cpu"] * 3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    if not slots:
        args.n_gpu  # noqa: B018  sets the attribute, which is overwritten
        args._n_gpu = 1
    given = {"train_dataset": data(29), "eval_dataset": data(10), **given}
    on_slots = {} if slots is None else {"devices": slots, "form": form}
    return trainer(model=model, args=args, **given, **on_slots)


def trained(*args, resume=None, **settings):
    trainer = trainer_for(*args, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def state_of(model):
    return {name: value.cpu().clone() for name, value in fully_shard.full_state_dict(model).items()}


def assert_same(trainer, expected):
    """That both logged the same losses, and have learned the same."""
    assert losses_of(trainer) == pytest.approx(losses_of(expected), rel=1e-6)
    torch.testing.assert_close(state_of(trainer.model), state_of(expected.model), rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def one_device(request, tmp_path_factory):
    return trained(gpt2(), tmp_path_factory.mktemp("one"), trainer=Trainer)


@pytest.fixture(scope="module")
def on_slots(make_trained):
    return make_trained


@all_forms
class TestTraining:
    def test_losses_and_parameters(self, form, slots, one_device, tmp_path):
        trainer = trained(gpt2(), tmp_path, slots, form)
        assert len(losses_of(trainer)) == STEPS
        assert losses_of(trainer)[-1] < losses_of(trainer)[0]
        assert_same(trainer, one_device)

    def test_it_goes_on_from_a_checkpoint(self, form, slots, one_device, tmp_path):
        trained(gpt2(), tmp_path, slots, form)
        checkpoint = str(tmp_path / f"checkpoint-{STEPS // 2}")
        assert_same(trained(gpt2(), tmp_path, slots, form, resume=checkpoint), one_device)
        assert_same(trained(gpt2(), tmp_path, trainer=Trainer, resume=checkpoint), one_device)

    def test_what_is_saved_loads_into_a_plain_model(self, form, slots, one_device, tmp_path):
        trained(gpt2(), tmp_path, slots, form).save_model(tmp_path / "saved")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
        assert type(loaded) is GPT2LMHeadModel
        torch.testing.assert_close(loaded.state_dict(), state_of(one_device.model), rtol=1e-9, atol=1e-9)

    def test_the_best_model_is_loaded(self, form, slots, tmp_path):
        settings = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "learning_rate": 0.5}
        one, several = (
            trained(gpt2(), tmp_path / str(trainer), *on, trainer=trainer, **settings)
            for on, trainer in (((), Trainer), ((slots, form), SlotsTrainer))
        )
        assert several.state.best_metric == pytest.approx(one.state.best_metric, rel=1e-6)
        assert_same(several, one)

    def test_gradients_wait_on_their_slots_until_the_last_batch_of_a_step(self, form, slots, tmp_path):
        seen = {}

        class Look(TrainerCallback):
            def on_substep_end(self, args, state, control, model, **kwargs):
                seen.setdefault(type(model).__mro__, model.lm_head.weight.grad)
                control.should_training_stop = True

        for trainer, on in ((Trainer, ()), (SlotsTrainer, (slots, form))):
            made = trainer_for(gpt2(), tmp_path, *on, trainer=trainer)
            made.add_callback(Look)
            made.train()
        expected, found = seen.values() if len(seen) > 1 else [*seen.values()] * 2
        is_complete = found is not None and torch.allclose(found.cpu(), expected.cpu())
        assert is_complete == (form == "DataParallel")

    @pytest.mark.parametrize("divides", [False, True])
    def test_losses_that_do_not_depend_on_num_items_in_batch(self, form, slots, divides, tmp_path):
        # BERT takes the argument and does not use it. Where a model says so, the trainer divides by the batches.
        settings = {"train_dataset": classified(29), "eval_dataset": classified(10)}
        trainers = []
        for trainer, on in ((Trainer, ()), (SlotsTrainer, (slots, form))):
            model = bert()
            if divides:
                model.accepts_loss_kwargs = False
            trainers.append(trained(model, tmp_path, *on, trainer=trainer, **settings))
        assert_same(*reversed(trainers))
        found, expected = (trainer.evaluate()["eval_loss"] for trainer in trainers)
        assert found == pytest.approx(expected, rel=1e-6)


def classified(samples):
    return [{**each, "labels": index % 3} for index, each in enumerate(examples(samples))]
