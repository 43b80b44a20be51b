"""Where a step goes, before and after a change: the loss of a language model moves into its ``forward``.

    python trace_before_and_after.py [FOLDER]

Four simulated devices train a small model with a large vocabulary. Before, each step gathers the logits of all replicas
on the first device, and computes the loss there. After, each replica computes its own and returns one number. The
tables go to ``trace_before.txt`` and ``trace_after.txt`` in the folder, and the pictures to ``trace_before.png`` and
``trace_after.png``; by default, to the current folder.

With accelerators, leave out ``simulate`` and list them in ``devices``. Simulated ones share the cores of the CPU.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import dataparallel
from dataparallel.composable import replicate
from nogpu import simulate

VOCABULARY, WIDTH, LENGTH, SAMPLES = 4096, 64, 32, 16
SETTLING, TRACED = 40, 100
"""Steps before the first trace, and steps that are traced one by one."""


class Model(nn.Module):
    """Tokens in, logits of the next ones out."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        """Logits of shape (samples, length, vocabulary)."""
        return self.head(self.blocks(self.tokens(tokens)))


class ModelWithLoss(Model):
    """Tokens and those that follow in, the loss out."""

    def forward(self, tokens, following):
        """The mean over the samples."""
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), following.flatten())


def before(devices):
    """A step whose loss is computed from the gathered logits."""
    model = replicate(Model().to(devices[0]), devices=devices)
    return model, lambda tokens, following: F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def after(devices):
    """A step whose loss is computed by the replicas, which have as many samples each."""
    model = replicate(ModelWithLoss().to(devices[0]), devices=devices)
    return model, lambda tokens, following: model(tokens, following).mean()


def traced(make, devices):
    """A trace of a step, and its loss. The first steps settle, and of the later ones the shortest is shown.

    Other programs take the cores too, and make some steps longer.
    """
    torch.manual_seed(0)
    model, loss_of = make(devices)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1)).to(devices[0])

    def step():
        loss = loss_of(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(SETTLING):
        step()
    traces = []
    for _ in range(TRACED):
        with dataparallel.trace() as trace:
            loss = step()
        traces.append(trace)
    return min(traces, key=lambda trace: trace.results.seconds), loss.item()


def main(folder, devices):
    """Traces both, and compares their losses."""
    losses = []
    for make in (before, after):
        with torch.sim.clocks(False):  # no accelerator checks each access to its memory
            trace, loss = traced(make, devices)
        (folder / f"trace_{make.__name__}.txt").write_text(f"{trace}\n", encoding="utf-8")
        trace.plot(folder / f"trace_{make.__name__}.png")
        print(f"{make.__name__}: {trace.advice}")
        losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), simulate(4))
