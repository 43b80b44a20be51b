"""Models with the module trees of well-known ones: so narrow that their time is mostly overhead, or of their real size.

The cost of replicating depends on the number of modules, parameters and buffers. The cost of running depends on the
number of operators. Their size matters less. ResNet-50 has many of all of them, GPT-2 has a long row of small blocks,
and BERT has a module around every linear. A wider GPT is there for the opposite: it spends its time in its operators.

`RealShape` is for predictions: nothing is downloaded, and nobody computes with them. Devices that are simulated with
``compute=False`` skip kernels and touch no memory, so that a step of such a model takes no longer than its Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dataparallel.testing.models.resnet import ResNet50

VOCABULARY = 64
LENGTH = 32
GPT2_VOCABULARY, GPT2_LENGTH = 50_257, 1024
BERT_VOCABULARY, BERT_LENGTH = 30_522, 512
WIDTH, HEADS, BLOCKS = 768, 12, 12  # of GPT-2 small and of BERT-base
TOKENS = 512  # in a text
WORDS = 128  # in a sentence
IMAGE = (3, 224, 224)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """Tokens `(n, length)` in, logits `(n, length, vocabulary)` out. GPT-2's smallest is 768 wide, with 12 heads.

    With ``tied`` the head has the weight of the tokens, as GPT-2's.
    """

    def __init__(
        self,
        width: int = 24,
        blocks: int = 12,
        heads: int = 2,
        length: int = LENGTH,
        vocabulary: int = VOCABULARY,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BERTEmbeddings(nn.Module):
    """The sum of embeddings of words, positions and token types, of which there is only one here."""

    def __init__(self, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.token_type = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("position_ids", torch.arange(length), persistent=False)
        self.register_buffer("token_type_ids", torch.zeros(length, dtype=torch.long), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        places = self.position(self.position_ids[:length]) + self.token_type(self.token_type_ids[:length])
        return self.dropout(self.norm(self.word(tokens) + places))


class SelfAttention(nn.Module):
    """Attention in both directions, with a linear each for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        return self.dropout(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class AddAndNorm(nn.Module):
    """A linear beside a shortcut, normalised."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        return self.norm(self.dropout(self.dense(x)) + shortcut)


class BERTLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(width, heads), "output": AddAndNorm(width, width)})
        self.intermediate = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.output = AddAndNorm(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x), x)
        return self.output(self.intermediate(x), x)


class BERT(nn.Module):
    """Tokens `(n, length)` in, pooled `(n, width)` out. BERT-base is 768 wide, with 12 heads.

    Dropout is 0, so that steps can be compared.
    """

    def __init__(
        self, width: int = 24, layers: int = 12, heads: int = 2, length: int = LENGTH, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embeddings = BERTEmbeddings(width, length, vocabulary)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(BERTLayer(width, heads) for _ in range(layers))})
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.encoder["layer"]:
            x = layer(x)
        return self.pooler(x[:, 0])


class WithLoss(nn.Module):
    """Inputs and targets in, the mean cross entropy of ``model``'s logits out, as a tensor of one element.

    The logits' last dimension has the classes. One element rather than none: gathered, such tensors are a vector.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten()).unsqueeze(0)


class InARow(nn.Module):
    """Calls ``module`` with one chunk of the batch after the other, on one device and without any library.

    This is what splitting a batch costs by itself: small chunks cost more per sample than one large batch. What else
    is passed is left out.
    """

    def __init__(self, module: nn.Module, chunks: int) -> None:
        super().__init__()
        self.module = module
        self.chunks = chunks

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return torch.cat([self.module(chunk) for chunk in x.chunk(self.chunks)])


@dataclass(frozen=True)
class Shape:
    """A model and a batch to train it on. Both come from seeds and are the same at every call."""

    name: str
    make: Callable[[], nn.Module]
    make_batch: Callable[[int], Tensor]
    modules: int
    parameters: int
    buffers: int

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()

    def batch(self, samples: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make_batch(samples)


RESNET = Shape("ResNet-50 of width 4", ResNet50, lambda n: torch.randn(n, 3, 64, 64), 151, 161, 159)
NARROW_GPT = Shape("GPT of width 24", GPT, lambda n: torch.randint(VOCABULARY, (n, LENGTH)), 114, 149, 0)
NARROW_BERT = Shape("BERT of width 24", BERT, lambda n: torch.randint(VOCABULARY, (n, LENGTH)), 228, 199, 2)
WIDE_GPT = Shape(
    "GPT of width 128",
    lambda: GPT(128, heads=4, length=64),
    lambda n: torch.randint(VOCABULARY, (n, 64)),
    114,
    149,
    0,
)
SHAPES = [RESNET, NARROW_GPT, NARROW_BERT, WIDE_GPT]


@dataclass(frozen=True)
class RealShape:
    """A model of ``parameters`` numbers in float32 without its loss, and the samples of each device in a step.

    ``inputs`` and ``targets`` are the shapes of one sample's. ``dtype`` is that of the inputs.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    dtype: torch.dtype
    targets: tuple[int, ...]
    samples: int
    parameters: int

    def model(self, device: torch.device) -> nn.Module:
        """With its loss, on ``device`` from the beginning. Where kernels are skipped, initial values cost nothing."""
        with device:
            return WithLoss(self.make())

    def batch(self, devices: int, pinned: bool = False) -> tuple[Tensor, Tensor]:
        """Inputs and targets for so many devices, in the host's memory, with arbitrary values: nobody reads them."""
        count = self.samples * devices
        return (
            torch.empty(count, *self.inputs, dtype=self.dtype, pin_memory=pinned),
            torch.empty(count, *self.targets, dtype=torch.long, pin_memory=pinned),
        )


def bert() -> nn.Module:
    """BERT-base with a classifier of two kinds of sentences."""
    return nn.Sequential(BERT(WIDTH, BLOCKS, HEADS, BERT_LENGTH, BERT_VOCABULARY), nn.Linear(WIDTH, 2))


def gpt2() -> nn.Module:
    return GPT(WIDTH, BLOCKS, HEADS, GPT2_LENGTH, GPT2_VOCABULARY, tied=True)


RESNET50 = RealShape(
    "ResNet-50, 32 images", lambda: ResNet50(64, classes=1000), IMAGE, torch.float32, (), 32, 25_557_032
)
"""v1.5: the 3x3 convolution has the stride."""
RESNET50_4 = replace(RESNET50, name="ResNet-50, 4 images", samples=4)
GPT_768 = RealShape(
    "GPT of width 768, 512 tokens",
    lambda: GPT(WIDTH, BLOCKS, HEADS, TOKENS),
    (TOKENS,),
    torch.long,
    (TOKENS,),
    1,
    85_547_520,
)
"""The blocks of GPT-2 small without its vocabulary."""
GPT2_SMALL = RealShape("GPT-2 small, 8 x 512 tokens", gpt2, (TOKENS,), torch.long, (TOKENS,), 8, 124_439_808)
BERT_BASE = RealShape("BERT-base, 32 x 128 tokens", bert, (WORDS,), torch.long, (), 32, 109_483_778)

REAL_SHAPES = [RESNET50, RESNET50_4, GPT_768, GPT2_SMALL, BERT_BASE]
