"""Trains a small GPT-2 of transformers with its ``Trainer``, on all devices.

    pip install transformers accelerate
    python examples/finetune_gpt2.py

Nothing is downloaded: the model has random weights, and the text is the source of Python's ``argparse``, byte by byte.
For weights that are trained already, write ``GPT2LMHeadModel.from_pretrained("gpt2")`` and use its tokenizer. It takes
all accelerators; without any, two slots on the CPU.
"""

import argparse
import inspect
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from dataparallel import DataParallel

LENGTH = 64
slots = list(range(torch.accelerator.device_count())) or ["cpu", "cpu"]
device = torch.device(slots[0])
text = torch.tensor(list(inspect.getsource(argparse).encode()))


class Arguments(TrainingArguments):
    """The model is on its slots already."""

    place_model_on_device = False


class SlotsTrainer(Trainer):
    """Makes one loss of those of the replicas."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """With ``num_items_in_batch`` each loss is a sum, divided by all tokens already."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss.mean() if num_items_in_batch is None else loss.sum()
        return (loss, outputs) if return_outputs else loss


torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=128, n_embd=96, n_layer=2, n_head=4, bos_token_id=10, eos_token_id=None)
gpt2 = GPT2LMHeadModel(config).to(device)
with tempfile.TemporaryDirectory() as folder:
    arguments = Arguments(
        output_dir=folder,
        max_steps=60,
        per_device_train_batch_size=32,  # of the whole batch
        learning_rate=3e-3,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        label_names=["labels"],
        use_cpu=device.type == "cpu",
    )
    arguments._n_gpu = 1  # the trainer is not to wrap the model itself
    trainer = SlotsTrainer(
        model=DataParallel(gpt2, slots, output_device=arguments.device),
        args=arguments,
        train_dataset=[{"input_ids": part, "labels": part} for part in text.split(LENGTH)[:-1]],
    )
    trainer.accelerator.device_placement = False
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("loss on", len(slots), "slots:", *(f"{float(loss):.2f}" for loss in losses))
