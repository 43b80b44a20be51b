"""transformers' `Trainer` on several GPUs: it wraps the model in ``torch.nn.DataParallel`` itself, on all of them."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tiny import examples, gpt2
from transformers import Trainer, TrainingArguments

import dataparallel
from dataparallel import replace_torch

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


def trainer_for(model, folder, gpus, batch_size=PER_DEVICE, trainer=Trainer, samples=None, **settings):
    """A trainer that finds this number of GPUs. By default all batches are full."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        learning_rate=0.02,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        label_names=["labels"],
        **{"save_strategy": "no", **settings},
    )
    if gpus == 1:
        arguments._n_gpu = 1
    assert arguments.n_gpu == gpus
    data = examples(samples or 8 * torch.cuda.device_count())
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
    """For a wrapper that the user makes: each replica needs the number that is in a row for each GPU."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch[0, 0]
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.fixture(params=["torch", "ours"])
def wrapper(request):
    """torch's class, as the trainer finds it, or ours, by nothing but `replace_torch`."""
    if request.param == "torch":
        yield nn.DataParallel
        return
    with replace_torch():
        assert issubclass(nn.DataParallel, dataparallel.DataParallel)
        yield nn.DataParallel


class TestTheTrainerWraps:
    def test_losses_and_parameters(self, gpus, accumulation, expected, wrapper, tmp_path):
        made = trainer_for(gpt2(), tmp_path, gpus, **accumulation)
        found = trained(made)
        assert type(made.model_wrapped) is wrapper
        assert len(made.model_wrapped.device_ids) == gpus
        assert_same(found, expected)


@pytest.mark.filterwarnings("error:as torch.nn.DataParallel does")
class TestUnevenLastBatches:
    """The trainer counts the batch's tokens once for each GPU, and the last batch may be for fewer of them."""

    def made(self, folder, gpus, accumulation, **settings):
        samples = 3 * gpus + 2  # a full batch, and one with a chunk of two for about half of the GPUs
        return trainer_for(gpt2(), folder, gpus, samples=samples, **accumulation, **settings)

    def test_losses_parameters_and_evaluation(self, gpus, accumulation, tmp_path):
        theirs = self.made(tmp_path / "torch", gpus, accumulation)
        expected = trained(theirs), theirs.evaluate()["eval_loss"]
        with replace_torch():
            ours = self.made(tmp_path / "ours", gpus, accumulation)
            found = trained(ours), ours.evaluate()["eval_loss"]
        assert isinstance(ours.model_wrapped, dataparallel.DataParallel)
        assert_same(found[0], expected[0])
        assert found[1] == pytest.approx(expected[1], rel=1e-6)

    @pytest.mark.parametrize("first", ["torch", "ours"])
    def test_saving_and_resuming(self, first, gpus, accumulation, tmp_path):
        """A training goes on with the other class."""
        whole = trained(self.made(tmp_path / "whole", gpus, accumulation))
        before, after = (replace_torch, nullcontext) if first == "ours" else (nullcontext, replace_torch)
        with before():
            halfway = {"save_strategy": "steps", "save_steps": STEPS // 2}
            self.made(tmp_path, gpus, accumulation, **halfway).train()
        with after():
            again = self.made(tmp_path, gpus, accumulation)
            again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
        for name, value in again.model.state_dict().items():
            torch.testing.assert_close(value, whole[1][name], rtol=1e-9, atol=1e-9)


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
