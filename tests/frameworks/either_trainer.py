"""A trainer of transformers, or one that is built on it, on slots or on one device with the same batches."""

import torch
from transformers import TrainingArguments

from dataparallel.composable import fully_shard
from dataparallel.integrations.transformers import OnSlots

__all__ = ["losses_of", "state_of", "trainer_on"]


def trainer_on(slots, form, trainer, folder, given, arguments=TrainingArguments, rows=6, **settings):
    """A trainer with ``OnSlots`` before its class, or without slots as it is.

    Args:
        slots: three, or None.
        form: its name.
        trainer: the class.
        folder: where it writes.
        given: arguments of the class.
        arguments: the class of its settings.
        rows: of a batch.
        **settings: further ones.
    """
    per_device = rows // (len(slots) if slots else 1)
    usual = {"per_device_train_batch_size": per_device, "per_device_eval_batch_size": per_device, "logging_steps": 1}
    usual |= {"use_cpu": not torch.cuda.is_available() or slots == ["cpu"] * 3, "report_to": [], "disable_tqdm": True}
    args = arguments(output_dir=str(folder), **{**usual, **settings})
    if not slots:
        args.n_gpu  # noqa: B018  sets the attribute, which is overwritten
        args._n_gpu = 1
        return trainer(args=args, **given)
    on_slots = trainer if issubclass(trainer, OnSlots) else type("SlotsTrainer", (OnSlots, trainer), {})
    return on_slots(args=args, devices=slots, form=form, **given)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def state_of(model):
    return {name: value.cpu().clone() for name, value in fully_shard.full_state_dict(model).items()}
