"""A small residual network learns to read handwritten digits, on any list of slots.

The data are the 1,797 scans that come with scikit-learn, 8 by 8 pixels each. The training loop is an ordinary one:
only the line that wraps the network knows of several slots. This module compares and judges nothing. That is done by
`test_main_job.py`.

Training is the same computation on any number of slots, up to rounding:

- The whole batch has the same samples for every number of slots. Only the split differs.
- `GroupNorm` normalises each sample by itself, so no sample depends on how the batch was split.
- The loss is the mean over the gathered logits. Every sample has the same weight, also where the chunks differ in
  size (the last batch of an epoch has 29 samples).
- Weights and shuffles come from seeds and are drawn on the CPU, the weights in float32. So they are the same on every
  device and in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from dataparallel import DataParallel

BATCH_SIZE = 128
PEAK_LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
LABEL_SMOOTHING = 0.1

Way = Callable[[nn.Module, Sequence[torch.device]], nn.Module]
"""Takes the network, which is on the first of the slots, and returns what is called."""


@dataclass(frozen=True)
class Digits:
    """Images `(n, 1, 8, 8)` from 0 to 1 and labels `(n,)` from 0 to 9, for training and test."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Digits:
        """The same data on `device`, the images in `dtype`."""
        return Digits(
            self.train_images.to(device, dtype),
            self.train_labels.to(device),
            self.test_images.to(device, dtype),
            self.test_labels.to(device),
        )


def load() -> Digits:
    """A fifth of the scans is for the test: always the same ones, with the same share of each digit."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).view(-1, 1, 8, 8) / 16
    train, test = train_test_split(torch.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    digits = torch.from_numpy(labels)
    return Digits(images[train], digits[train], images[test], digits[test])


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut.

    No convolution has a bias, because the normalisation after it would remove most of the bias again.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, groups: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(groups, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(groups, outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.body(x))


class ResidualNet(nn.Sequential):
    """From images `(n, 1, 8, 8)` to logits `(n, 10)`; 85,000 parameters at the default width."""

    def __init__(self, width: int = 24) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.GroupNorm(4, width),
            ResidualBlock(width, width),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )


class TrainingRun:
    """One training of so many ``epochs``, an epoch at a time, so that several trainings can take turns.

    ``way`` wraps the network for ``slots``. `losses` has the loss of every step so far.
    """

    def __init__(self, slots: Sequence[torch.device], dtype: torch.dtype, epochs: int, way: Way = DataParallel) -> None:
        self.slots, self.epochs = list(slots), epochs
        self.losses: list[float] = []
        self.data = load().to(self.slots[0], dtype)
        self._shuffles = torch.Generator().manual_seed(0)
        self.model = way(network().to(self.slots[0], dtype), self.slots)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=WEIGHT_DECAY)
        steps = epochs * len(self._batches())
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, PEAK_LEARNING_RATE, total_steps=steps)

    def train_epoch(self) -> None:
        """Trains once on all training data."""
        self.model.train()
        losses = []
        for batch in self._batches():
            logits = self.model(self.data.train_images[batch])
            labels = self.data.train_labels[batch]
            loss = F.cross_entropy(logits, labels, label_smoothing=LABEL_SMOOTHING)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._schedule.step()
            losses.append(loss.detach())
        self.losses += torch.stack(losses).tolist()

    def train(self) -> TrainingRun:
        """All epochs at once."""
        for _ in range(self.epochs):
            self.train_epoch()
        return self

    @torch.no_grad()
    def accuracy(self) -> float:
        """The share of the test images that is read correctly."""
        self.model.eval()
        answers = self.model(self.data.test_images).argmax(dim=1)
        return (answers == self.data.test_labels).double().mean().item()

    def _batches(self) -> tuple[Tensor, ...]:
        order = torch.randperm(len(self.data.train_labels), generator=self._shuffles)
        return order.to(self.slots[0]).split(BATCH_SIZE)


def network() -> nn.Module:
    """The same one at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResidualNet()


def largest_difference(one: TrainingRun, other: TrainingRun) -> float:
    """Between the loss curves of two trainings: the largest absolute difference of any step."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
