"""Trains a GPT whose parameters, gradients and optimizer state are divided among 8 slots, and saves and loads it.

    python examples/shard_gpt.py

``fully_shard`` is for models that do not fit on one device. This one is tiny. It learns the source text of ``argparse``
byte by byte. The checkpoint is a plain one: it loads on any number of devices, and into a program without this library.
It takes all accelerators; without any, eight slots on the CPU.
"""

import argparse
import inspect
import os
import tempfile

import torch
from torch import nn

from dataparallel.composable import fully_shard

slots = list(range(torch.accelerator.device_count())) or ["cpu"] * 8
text = torch.tensor(list(inspect.getsource(argparse).encode()))
LENGTH, WIDTH = 64, 128


class GPT(nn.Module):
    """Bytes and those that follow in, both ``(n, LENGTH)``; the mean loss of each text out, ``(n,)``."""

    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, inputs, targets):
        """The loss is computed on the slots, so that no logits are gathered."""
        x = self.bytes(inputs) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), targets, reduction="none").mean(1)


def sharded_gpt(devices):
    """The model, divided among the devices, and its optimizer, whose state is divided as well."""
    model = GPT()
    for block in model.blocks:
        fully_shard(block, devices=devices)
    fully_shard(model, devices=devices)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)  # afterwards: it needs the sharded parameters


def batch():
    """32 texts from random places, and the same texts one byte further."""
    places = torch.randint(len(text) - LENGTH, (32, 1)) + torch.arange(LENGTH)
    return text[places], text[places + 1]


torch.manual_seed(0)
model, optimizer = sharded_gpt(slots)
whole = sum(parameter.numel() for parameter in model.parameters())
owned = sum(parameter.shards[0].numel() for parameter in model.parameters())
print(f"parameters: {whole:,}, of which slot 0 owns {owned:,}")
for step in range(21):
    loss = model(*batch()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2}: loss {loss:.3f}")

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "checkpoint.pt")
    torch.save(fully_shard.full_state_dict(model, optimizer), path)
    restored, its_optimizer = sharded_gpt(slots[:2])
    fully_shard.load_full_state_dict(restored, torch.load(path, weights_only=True), its_optimizer)

inputs = batch()
with torch.no_grad():
    losses = [each(*inputs).mean() for each in (model, restored)]
print(f"loss before and after loading on {len(slots[:2])} slots: {losses[0]:.4f} {losses[1]:.4f}")
