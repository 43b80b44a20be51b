"""The models whose steps are timed and predicted: inputs and targets in, a loss out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dataparallel.testing.models.resnet import ResNet50
from dataparallel.testing.models.transformer import ModelArgs, Transformer

_GPT2 = ModelArgs(n_layers=12, vocab_size=50_257, max_seq_len=1024, dim=768, n_heads=12, dropout_p=0.0)


class WithCrossEntropy(nn.Module):
    """A model and its loss. The loss is a vector of one element, so that those of replicas are joined."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of the logits, whose last dimension has the classes."""
        losses = F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten(), reduction="none")
        return losses.mean(0, keepdim=True)


@dataclass(frozen=True)
class TrainedModel:
    """A model and batches for it.

    Attributes:
        inputs: the shape of one sample: tokens if it has one dimension, an image if it has three.
        classes: the number of tokens, or of labels.
        samples: of each device in a step.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int
    samples: int

    def model(self, device: torch.device) -> nn.Module:
        """The same weights in each process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with device:
                return WithCrossEntropy(self.make()).to(device)

    def batch(self, devices: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets for so many devices."""
        count = devices * self.samples
        if len(self.inputs) == 3:
            return torch.zeros(count, *self.inputs, device=device), torch.zeros(count, dtype=torch.long, device=device)
        tokens = torch.arange(count * self.inputs[0], device=device).view(count, -1) % self.classes
        return tokens, tokens


def training_step(
    module: nn.Module, call: Callable[..., Tensor], inputs: Tensor, targets: Tensor
) -> Callable[[], None]:
    """A step of SGD on ``module`` with the loss that ``call`` returns, always of this batch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        call(inputs, targets).mean().backward()
        optimizer.step()

    return step


RESNET = TrainedModel("ResNet-50, 32 images", lambda: ResNet50(64, 1000), (3, 224, 224), 1000, 32)
GPT2 = TrainedModel("GPT-2 small, 8 x 512 tokens", lambda: Transformer(_GPT2), (512,), 50_257, 8)
LAUNCH_BOUND = TrainedModel(
    "GPT of width 24", lambda: Transformer(replace(_GPT2, vocab_size=64, dim=24, n_heads=2)), (32,), 64, 2
)
MODELS = (LAUNCH_BOUND, RESNET, GPT2)
BY_NAME = {model.name: model for model in MODELS}
