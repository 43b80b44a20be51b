"""What detectors of torchvision are made of here, with random weights, and batches for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator

from dataparallel import samples

__all__ = ["CLASSES", "SIZES", "Marked", "anchors", "backbone", "batch", "in_float64", "same_sizes"]

CLASSES = 4
SIZES = {"min_size": 32, "max_size": 48}


def backbone() -> nn.Sequential:
    """One small map of features."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
    layers.out_channels = 8
    return layers


def anchors() -> AnchorGenerator:
    """Six for each place of the map."""
    return AnchorGenerator(sizes=((8, 16),), aspect_ratios=((0.5, 1.0, 2.0),))


class Marked(nn.Module):
    """A detector. In eval mode its forward marks what it returns as one entry a sample."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        found = self.net(images, targets)
        return found if self.training else samples(found)


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, new tensors are float64, and so are anchors."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def batch(count: int, root: torch.device | str) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images of several sizes, with one to three boxes."""
    generator = torch.Generator().manual_seed(1)
    images, targets = [], []
    for i in range(count):
        images.append(torch.rand(3, 32, 32 + 4 * (i % 3), dtype=torch.float64, generator=generator).to(root))
        corners = 16 * torch.rand(1 + i % 3, 2, dtype=torch.float64, generator=generator)
        sizes = 4 + 10 * torch.rand(1 + i % 3, 2, dtype=torch.float64, generator=generator)
        labels = torch.randint(1, CLASSES, (len(corners),), generator=generator)
        targets.append({"boxes": torch.cat([corners, corners + sizes], 1).to(root), "labels": labels.to(root)})
    return images, targets


def same_sizes(images: list[Tensor]) -> list[Tensor]:
    """Images of a batch are padded to the largest one of it, which changes what is seen at the borders."""
    return [nn.functional.pad(image, (0, 40 - image.shape[2])) for image in images]
