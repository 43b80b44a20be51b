"""Small models for the tests of compiled replicas, and their batches.

The GPT, whose head is tied to its embedding, and the ResNet, whose batch statistics change in training, are those of
the tests of `fully_shard`. Here are a BERT-shaped encoder with a padding mask, and an encoder and decoder like T5's,
with one embedding for both and for the head. `units()` of each says which modules are its blocks: they are compiled by
themselves where blocks are compiled, and sharded by themselves.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataparallel.testing.cases import Batch, generator, numbers, seeded, tokens
from sharded_models import GPT, LENGTH, VOCABULARY, WIDTH, ResNet, Units
from sharded_steps import Model

HEADS = 2
KINDS = 2  # of tokens
FARTHEST = 3  # tokens that are farther apart have the same bias
TARGETS = 4  # tokens that the decoder reads


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


class Attention(nn.Module):
    """T5's: no scaling, no biases in the linears, and a learned bias for each distance and head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = heads_of(self.query(x)), heads_of(self.key(memory)), heads_of(self.value(memory))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        return self.out(attended.transpose(1, 2).flatten(2))


class Distances(nn.Module):
    """The bias `(heads, length, length)` that all blocks of a stack share; minus infinity where nothing may be read."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.table = nn.Embedding(2 * FARTHEST + 1, HEADS)

    def forward(self, length: int) -> Tensor:
        places = torch.arange(length, device=self.table.weight.device)
        distance = places[None, :] - places[:, None]
        bias = self.table(distance.clamp(-FARTHEST, FARTHEST) + FARTHEST).permute(2, 0, 1)
        return bias.masked_fill(distance > 0, -math.inf) if self.causal else bias


class T5Block(nn.Module):
    """An encoder's block, or with ``reads_encoder`` a decoder's, which attends to the encoder's output too."""

    def __init__(self, reads_encoder: bool) -> None:
        super().__init__()
        self.own = Attention()
        self.cross = Attention() if reads_encoder else None
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.own(normed, normed, bias)
        if self.cross is not None:
            assert memory is not None
            x = x + self.cross(self.norms[1](x), memory, None)
        return x + self.mlp(self.norms[2](x))


class T5(nn.Module):
    """Tokens for the encoder and for the decoder in, logits of the decoder's tokens out.

    Source of the architecture: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer, 2020. Distances are clamped here instead of put into buckets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.distances = nn.ModuleList(Distances(causal) for causal in (False, True))
        self.encoder = nn.ModuleList(T5Block(reads_encoder=False) for _ in range(2))
        self.decoder = nn.ModuleList([T5Block(reads_encoder=True)])
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight

    def units(self) -> Units:
        return [*self.encoder, *self.decoder]

    def forward(self, tokens: Tensor, *, targets: Tensor) -> Tensor:
        memory = self.shared(tokens)
        bias = self.distances[0](tokens.shape[1])
        for block in self.encoder:
            memory = block(memory, bias)
        memory = self.norms[0](memory)
        x = self.shared(targets)
        bias = self.distances[1](targets.shape[1])
        for block in self.decoder:
            x = block(x, bias, memory)
        return self.head(self.norms[1](x) * WIDTH**-0.5)


def _sentences(size: int, seed: int) -> Batch:
    (words,), _ = tokens(LENGTH, VOCABULARY)(size, seed)
    lengths = 2 + torch.arange(size) % (LENGTH - 1)
    return (words,), {"padding": torch.arange(LENGTH) >= lengths[:, None]}


def _pairs_of_sentences(size: int, seed: int) -> Batch:
    (words,), _ = tokens(LENGTH, VOCABULARY)(size, seed)
    return (words,), {"targets": torch.randint(VOCABULARY, (size, TARGETS), generator=generator(seed + 1000))}


MODELS = {
    "gpt": Model(seeded(GPT), tokens(LENGTH, VOCABULARY)),
    "resnet": Model(seeded(ResNet, training=True), numbers(2, 8, 8), by_chunks=True),
    "bert": Model(seeded(BERT), _sentences),
    "t5": Model(seeded(T5), _pairs_of_sentences),
}
"""In float64, with the same weights each time. In the ResNet the samples of a chunk influence each other."""
