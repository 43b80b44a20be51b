"""Small models for the tests of compiled replicas, and their batches.

The GPT, whose head is tied to its embedding, and the ResNet, whose batch statistics change in training, are those of
the tests of `fully_shard`. Here is a BERT-shaped encoder with a padding mask. `units()` of each says which modules are
its blocks: they are compiled by themselves where blocks are compiled, and sharded by themselves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataparallel.testing.cases import Batch, numbers, seeded, tokens
from sharded_models import GPT, LENGTH, VOCABULARY, WIDTH, ResNet, Units
from sharded_steps import Model

HEADS = 2
KINDS = 2  # of tokens


def heads_of(x: Tensor) -> Tensor:
    """`(n, length, width)` as `(n, heads, length, width of a head)`."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Layer(nn.Module):
    """Attention in both directions and an MLP, each beside a shortcut and normalised afterwards, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value", "out")})
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (heads_of(self.attention[name](x)) for name in ("query", "key", "value"))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = self.norms[0](x + self.attention["out"](attended.transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.mlp(x))


class BERT(nn.Module):
    """Tokens and a mask `(n, length)` in, which is true for padding; hidden states and the pooled first token out."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.kind = nn.Embedding(KINDS, WIDTH)
        self.register_buffer("positions", torch.arange(LENGTH), persistent=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.pooler = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def units(self) -> Units:
        return [*self.layers]

    def forward(self, tokens: Tensor, *, padding: Tensor) -> dict[str, Tensor]:
        kinds = (self.positions >= LENGTH // 2).long()
        x = self.norm(self.word(tokens) + self.position(self.positions) + self.kind(kinds))
        mask = ~padding[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return {"hidden": x, "pooled": self.pooler(x[:, 0])}


def _sentences(size: int, seed: int) -> Batch:
    (words,), _ = tokens(LENGTH, VOCABULARY)(size, seed)
    lengths = 2 + torch.arange(size) % (LENGTH - 1)
    return (words,), {"padding": torch.arange(LENGTH) >= lengths[:, None]}


MODELS = {
    "gpt": Model(seeded(GPT), tokens(LENGTH, VOCABULARY)),
    "resnet": Model(seeded(ResNet, training=True), numbers(2, 8, 8), by_chunks=True),
    "bert": Model(seeded(BERT), _sentences),
}
"""In float64, with the same weights each time. In the ResNet the samples of a chunk influence each other."""
