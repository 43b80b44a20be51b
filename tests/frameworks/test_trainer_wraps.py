"""transformers' `Trainer` on several GPUs wraps a model in ``torch.nn.DataParallel``, but not a wrapper of ours."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tiny import examples, gpt2
from transformers import Trainer, TrainingArguments

from dataparallel import DataParallel

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
    """A trainer that finds this number of GPUs. All batches are full."""
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
        save_strategy="no",
        remove_unused_columns=False,  # it would look at the signature of the wrapper's forward
        **settings,
    )
    if gpus == 1:
        arguments._n_gpu = 1
    assert arguments.n_gpu == gpus
    return trainer(model=model, args=arguments, train_dataset=examples(8 * torch.cuda.device_count()))


def trained(trainer):
    """The losses that it logged, and what it has learned."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return losses, {name.removeprefix("module."): value for name, value in trainer.model.state_dict().items()}


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


def test_a_wrapper_of_ours_is_not_wrapped_again(gpus, accumulation, expected, tmp_path):
    model = DataParallel(gpt2().to("cuda:0"))
    trainer = trainer_for(model, tmp_path, gpus, trainer=OneNumber, **accumulation)
    found = trained(trainer)
    assert trainer.model_wrapped is model
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-9)
