"""transformers' `Trainer` on several GPUs: it wraps the model in ``torch.nn.DataParallel`` itself, on all of them."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tiny import examples, gpt2
from transformers import Trainer, TrainingArguments

import dataparallel

pytestmark = pytest.mark.devices("cuda")

STEPS = 4
PER_DEVICE = 2


@pytest.fixture
def gpus():
    """The number of GPUs: the trainer takes all of them."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    return count


def trainer_for(model, folder, gpus, batch_size=PER_DEVICE, trainer=Trainer, **settings):
    """A trainer that finds this number of GPUs."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        learning_rate=0.02,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        label_names=["labels"],
        **settings,
    )
    if gpus == 1:
        arguments._n_gpu = 1
    assert arguments.n_gpu == gpus
    data = examples(8 * torch.cuda.device_count())
    return trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)


def trained(trainer):
    """The losses that it logged, and what it has learned."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return losses, {name.removeprefix("module."): value for name, value in trainer.model.state_dict().items()}


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-9)


@pytest.fixture(params=[1, 2], ids=["each_step", "every_second_step"])
def accumulation(request):
    return {"gradient_accumulation_steps": request.param}


@pytest.fixture
def expected(gpus, accumulation, tmp_path):
    """What one GPU learns of the same batches."""
    return trained(trainer_for(gpt2(), tmp_path / "one", 1, PER_DEVICE * gpus, **accumulation))


class OneNumber(Trainer):
    """The trainer makes a row of ``num_items_in_batch`` for each GPU. It is no batch: each replica needs the number."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch[0, 0]
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


wrappers = pytest.mark.parametrize(
    ("wrapper", "trainer"),
    [(nn.DataParallel, Trainer), (dataparallel.DataParallel, OneNumber)],
    ids=["torch", "ours"],
)


@wrappers
class TestTheTrainerWraps:
    """Its ``nn.DataParallel`` is torch's, as it is, and then ours in its place."""

    @pytest.fixture(autouse=True)
    def wrapping(self, monkeypatch, wrapper):
        monkeypatch.setattr(nn, "DataParallel", wrapper)

    def test_losses_and_parameters(self, wrapper, trainer, gpus, accumulation, expected, tmp_path):
        made = trainer_for(gpt2(), tmp_path, gpus, trainer=trainer, **accumulation)
        found = trained(made)
        assert type(made.model_wrapped) is wrapper
        assert len(made.model_wrapped.device_ids) == gpus
        assert_same(found, expected)

    def test_evaluation(self, wrapper, trainer, gpus, tmp_path):
        one = trainer_for(gpt2(), tmp_path / "one", 1, PER_DEVICE * gpus).evaluate()["eval_loss"]
        assert trainer_for(gpt2(), tmp_path, gpus, trainer=trainer).evaluate()["eval_loss"] == pytest.approx(one)


class TestAWrapperOfOurs:
    def test_it_is_not_wrapped_again(self, gpus, accumulation, expected, tmp_path):
        model = dataparallel.DataParallel(gpt2().to("cuda:0"))
        trainer = trainer_for(model, tmp_path, gpus, trainer=OneNumber, **accumulation)
        found = trained(trainer)
        assert trainer.model_wrapped is model
        assert_same(found, expected)

    def test_rows_that_are_no_batch_are_refused(self, gpus, tmp_path):
        trainer = trainer_for(dataparallel.DataParallel(gpt2().to("cuda:0")), tmp_path, gpus)
        with pytest.raises(ValueError, match=r'batch sizes disagree .*"num_items_in_batch"'):
            trainer.train()
