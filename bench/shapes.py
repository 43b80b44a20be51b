"""Two models with the module trees of well-known ones, so narrow that what remains is mostly the cost of their shape.

What replicating costs depends on how many modules, parameters and buffers there are, what running costs on how many
operators; their size matters less. ResNet-50's tree has many of all of them, and GPT-2's small ones in long rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 64
LENGTH = 32


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution, each normalised, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + shortcut)


class ResNet50(nn.Sequential):
    """Images `(n, 3, h, w)` in, logits `(n, 10)` out. The original is 64 wide."""

    def __init__(self, width: int = 4) -> None:
        stem = [
            ("conv1", nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)),
            ("bn1", nn.BatchNorm2d(width)),
            ("relu", nn.ReLU(inplace=True)),
            ("maxpool", nn.MaxPool2d(3, stride=2, padding=1)),
        ]
        layers: list[tuple[str, nn.Module]] = []
        inputs = width
        for number, blocks in enumerate((3, 4, 6, 3)):
            outputs = width * 2**number
            layer = nn.Sequential()
            for block in range(blocks):
                layer.append(Bottleneck(inputs, outputs, stride=2 if block == 0 and number > 0 else 1))
                inputs = 4 * outputs
            layers.append((f"layer{number + 1}", layer))
        head = [("avgpool", nn.AdaptiveAvgPool2d(1)), ("fc", nn.Linear(inputs, 10))]
        super().__init__(OrderedDict([*stem, *layers, *head]))

    def forward(self, x: Tensor) -> Tensor:
        *features, classify = self
        for layer in features:
            x = layer(x)
        return classify(x.flatten(1))


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
    """Tokens `(n, length)` in, logits `(n, length, vocabulary)` out. GPT-2's smallest is 768 wide, with 12 heads."""

    def __init__(self, width: int = 24, blocks: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Shape:
    """A model with a batch to train it on; both come from seeds and are the same at every call."""

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


SHAPES = [
    Shape("ResNet-50 of width 4", ResNet50, lambda n: torch.randn(n, 3, 64, 64), 151, 161, 159),
    Shape("GPT of width 24", GPT, lambda n: torch.randint(VOCABULARY, (n, LENGTH)), 114, 149, 0),
]
