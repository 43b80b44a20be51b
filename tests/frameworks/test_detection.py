"""A detector of torchvision: lists of images and targets, one entry for each sample, are split over the slots."""

from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")

from torch import Tensor, nn
from torchvision.models.detection import RetinaNet, retinanet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou

from dataparallel import samples
from each_form import replicating_forms

CLASSES = 4


class Marked(nn.Module):
    """A detector. In eval mode its forward marks what it returns as one entry a sample."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        found = self.net(images, targets)
        return found if self.training else samples(found)


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


def detector():
    """RetinaNet on one small map of features."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
    backbone.out_channels = 8
    anchors = AnchorGenerator(sizes=((8, 16),), aspect_ratios=((0.5, 1.0, 2.0),))
    few = {"score_thresh": 0.0, "topk_candidates": 20, "detections_per_img": 5}
    return Marked(RetinaNet(backbone, CLASSES, anchor_generator=anchors, min_size=32, max_size=48, **few))


def suppressed(boxes, scores, labels, threshold):
    """In the place of torchvision's own, whose compiled operator does not know simulated devices."""
    kept = []
    for i in scores.argsort(descending=True, stable=True).tolist():
        same = [k for k in kept if labels[k] == labels[i]]
        if not same or box_iou(boxes[same], boxes[i : i + 1]).max() <= threshold:
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64, device=boxes.device)


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch, root):
    if root.type != "cuda":
        monkeypatch.setattr(retinanet.box_ops, "batched_nms", suppressed)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@replicating_forms
@pytest.mark.slots(1, 2, 3)
def test_losses_weighted_by_images_and_detections_are_those_of_one_device(form, slots, root):
    """RetinaNet divides the loss of each image by what is in it, and takes the mean over images."""
    model, wrapped = detector().to(root), form(detector().to(root), slots)
    images, targets = batch(7, root)
    chunks = torch.arange(7).chunk(len(slots))
    same = same_sizes(images)
    expected = model(same, targets)
    sum(expected.values()).backward()
    losses = wrapped(samples(same), samples(targets))
    counts = torch.tensor([len(chunk) for chunk in chunks]).to(root)
    found = {name: (values * counts).sum() / 7 for name, values in losses.items()} if len(slots) > 1 else losses
    sum(found.values()).backward()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(wrapped.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    model.eval()
    wrapped.eval()
    with torch.no_grad():
        detected = wrapped(samples(images))
        expected = [one for chunk in chunks for one in model([images[index] for index in chunk])]
    assert [len(one["boxes"]) for one in detected] == [5] * 7
    assert {value.device for one in detected for value in one.values()} == {root}
    torch.testing.assert_close([*detected], expected, rtol=1e-9, atol=1e-9)
