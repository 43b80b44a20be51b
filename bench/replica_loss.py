"""Prints the peak memory of each device in training steps of a GPT with 50,000 classes, as one line of JSON.

A process of its own, because it simulates devices without kernels: memory is counted, and nothing is computed.
`test_replica_loss.py` runs it.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from nogpu.simulated import simulate

SLOTS, CLASSES, WIDTH, BLOCKS, SAMPLES, TOKENS = 8, 50_000, 256, 4, 8, 128
MIB = 2**20


class GPT(nn.Module):
    """Returns logits of shape (samples, classes, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(BLOCKS))
        )
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens))).transpose(1, 2)


def peaks(form: str, on_replicas: bool) -> list[float]:
    """MiB on each device, in the third step."""
    slots = [torch.device("sim", k) for k in range(SLOTS)]
    module, criterion = GPT().to(slots[0]), nn.CrossEntropyLoss()
    loss = criterion if on_replicas else None
    model = (
        DataParallel(module, slots, loss=loss)
        if form == "DataParallel"
        else replicate(module, devices=slots, loss=loss)
    )
    tokens = torch.zeros(SLOTS * SAMPLES, TOKENS, dtype=torch.long, device=slots[0])
    for _ in range(3):
        for device in slots:
            torch.sim.reset_peak_memory_stats(device)
        found = model(tokens, target=tokens) if on_replicas else criterion(model(tokens), tokens)
        found.backward()
        module.zero_grad()
        del found
    return [torch.sim.max_memory_allocated(device) / MIB for device in slots]


if __name__ == "__main__":
    simulate(SLOTS, compute=False)
    rows = [
        {"form": form, "on_replicas": on_replicas, "mib": peaks(form, on_replicas)}
        for form in ("DataParallel", "replicate")
        for on_replicas in (False, True)
    ]
    print(json.dumps(rows))
