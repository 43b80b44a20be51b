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

from dataparallel.integrations.transformers import OnSlots

LENGTH = 64
slots = list(range(torch.accelerator.device_count())) or ["cpu", "cpu"]
text = torch.tensor(list(inspect.getsource(argparse).encode()))


class SlotsTrainer(OnSlots, Trainer):
    """A trainer that trains on slots."""


torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=128, n_embd=96, n_layer=2, n_head=4, bos_token_id=10, eos_token_id=None)
gpt2 = GPT2LMHeadModel(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=60,
        per_device_train_batch_size=16,  # of each slot
        learning_rate=3e-3,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        use_cpu=slots[0] == "cpu",
    )
    dataset = [{"input_ids": part, "labels": part} for part in text.split(LENGTH)[:-1]]
    trainer = SlotsTrainer(model=gpt2, args=arguments, train_dataset=dataset, devices=slots)
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("loss on", len(slots), "slots:", *(f"{float(loss):.2f}" for loss in losses))
