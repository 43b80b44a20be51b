"""Well-known models of their original size, for predictions: nothing is downloaded, and nobody computes with them.

Devices that are simulated with ``compute=False`` skip kernels and touch no memory, so that a step of such a model takes
no longer than its Python. `timelines` records these steps. Each model contains its loss, so that only one number for
each device travels back. `shapes` has the same module trees, but narrow, for what is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shapes import BERT, GPT, Block, ResNet50

CLASSES = 1000  # of ImageNet
SIDE = 224  # pixels
GPT2_VOCABULARY, GPT2_LENGTH = 50_257, 1024
BERT_VOCABULARY, BERT_LENGTH = 30_522, 512
WIDTH, HEADS, BLOCKS = 768, 12, 12  # of GPT-2 small and of BERT-base
TOKENS = 512  # in a text
WORDS = 128  # in a sentence
KINDS = 2  # of sentences


class WithLoss(nn.Module):
    """Inputs and targets in, the mean cross entropy of ``model``'s logits out, as a tensor of one element.

    The logits' last dimension has the classes. One element rather than none: gathered, such tensors are a vector.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten()).unsqueeze(0)


class GPT2(nn.Module):
    """Tokens `(n, length)` in, logits `(n, length, vocabulary)` out. The head's weight is that of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(GPT2_VOCABULARY, WIDTH)
        self.positions = nn.Embedding(GPT2_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, GPT2_VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def resnet50() -> nn.Module:
    """ResNet-50 v1.5 (the 3x3 convolution has the stride), 1000 classes."""
    model = ResNet50(width=64)
    model.fc = nn.Linear(model.fc.in_features, CLASSES)
    return WithLoss(model)


def gpt() -> nn.Module:
    """The blocks of GPT-2 small without its vocabulary."""
    return WithLoss(GPT(WIDTH, BLOCKS, HEADS, TOKENS))


def gpt2() -> nn.Module:
    return WithLoss(GPT2())


def bert() -> nn.Module:
    """BERT-base with a classifier of sentences. Dropout is 0."""
    model = BERT(WIDTH, BLOCKS, HEADS, BERT_LENGTH)
    model.embeddings.word = nn.Embedding(BERT_VOCABULARY, WIDTH)
    return WithLoss(nn.Sequential(model, nn.Linear(WIDTH, KINDS)))


@dataclass(frozen=True)
class RealShape:
    """A model of ``parameters`` numbers in float32, and the samples that each device gets in a step.

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
        """On ``device`` from the beginning. Where kernels are skipped, initial values cost nothing."""
        with device:
            return self.make()

    def batch(self, devices: int, pinned: bool = False) -> tuple[Tensor, Tensor]:
        """Inputs and targets for so many devices, in the host's memory, with arbitrary values: nobody reads them."""
        count = self.samples * devices
        return (
            torch.empty(count, *self.inputs, dtype=self.dtype, pin_memory=pinned),
            torch.empty(count, *self.targets, dtype=torch.long, pin_memory=pinned),
        )


IMAGE = (3, SIDE, SIDE)
RESNET50 = RealShape("ResNet-50, 32 images", resnet50, IMAGE, torch.float32, (), 32, 25_557_032)
GPT_768 = RealShape("GPT of width 768, 512 tokens", gpt, (TOKENS,), torch.long, (TOKENS,), 1, 85_547_520)
GPT2_SMALL = RealShape("GPT-2 small, 8 x 512 tokens", gpt2, (TOKENS,), torch.long, (TOKENS,), 8, 124_439_808)
BERT_BASE = RealShape("BERT-base, 32 x 128 tokens", bert, (WORDS,), torch.long, (), 32, 109_483_778)

REAL_SHAPES = [RESNET50, GPT_768, GPT2_SMALL, BERT_BASE]
