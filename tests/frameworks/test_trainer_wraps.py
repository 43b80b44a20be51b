"""transformers' `Trainer` on several GPUs: it wraps the model in ``torch.nn.DataParallel`` itself, on all of them."""

import pytest
import torch

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


def test_under_replace_torch_the_trainer_wraps_the_model_in_our_class(gpus, accumulation, expected, tmp_path):
    with replace_torch():
        made = trainer_for(gpt2(), tmp_path, gpus, **accumulation)
        assert_same(trained(made), expected)
    assert isinstance(made.model_wrapped, dataparallel.DataParallel)
    assert len(made.model_wrapped.device_ids) == gpus


@pytest.mark.filterwarnings("error:as torch.nn.DataParallel does")
def test_uneven_last_batches_are_those_of_torchs_class(gpus, accumulation, tmp_path):
    """The trainer counts the batch's tokens once for each GPU, and the last batch may be for fewer of them."""

    def outcome(folder):
        samples = 3 * gpus + 2  # a full batch, and one with a chunk of two for about half of the GPUs
        trainer = trainer_for(gpt2(), folder, gpus, samples=samples, **accumulation)
        return trained(trainer), trainer.evaluate()["eval_loss"]

    expected = outcome(tmp_path / "torch")
    with replace_torch():
        found = outcome(tmp_path / "ours")
    assert_same(found[0], expected[0])
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


def test_a_wrapper_of_ours_is_not_wrapped_again(gpus, accumulation, expected, tmp_path):
    model = dataparallel.DataParallel(gpt2().to("cuda:0"))
    trainer = trainer_for(model, tmp_path, gpus, trainer=OneNumber, **accumulation)
    found = trained(trainer)
    assert trainer.model_wrapped is model
    assert_same(found, expected)
