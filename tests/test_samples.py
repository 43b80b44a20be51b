"""Models that take lists with one entry for each sample compute with every form what they compute on one device.

How the lists are cut and joined is in batches/test_samples.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel
import each_form
from dataparallel import DataParallel, samples

SAMPLES = 7


class Detector(nn.Module):
    """Images of several sizes in, losses out; without targets the detections of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.head = nn.Linear(5, 4)

    def boxes(self, images: Any) -> list[Tensor]:
        assert isinstance(images, list)
        return [self.head(self.body(image.flatten(1).T)) for image in images]

    def forward(self, images: Any, targets: Any = None) -> Any:
        found = self.boxes(images)
        if targets is None:
            return samples([{"boxes": each, "count": len(each)} for each in found])
        assert isinstance(targets, list)
        assert len(targets) == len(images)
        errors = [((each - target["boxes"]) ** 2).sum() for each, target in zip(found, targets, strict=True)]
        return {"boxes": torch.stack(errors).sum(), "size": sum(each.abs().mean() for each in found)}


def batch(device: Any = "cpu", count: int = SAMPLES) -> tuple[list[Tensor], list[dict[str, Any]]]:
    made = torch.Generator().manual_seed(0)
    images = [torch.randn(3, 2, 1 + i, dtype=torch.float64, generator=made) for i in range(count)]
    targets = [
        {"boxes": torch.randn(2 * (1 + i), 4, dtype=torch.float64, generator=made), "id": i} for i in range(count)
    ]
    return [image.to(device) for image in images], [{**each, "boxes": each["boxes"].to(device)} for each in targets]


@pytest.fixture
def net(root: torch.device) -> Detector:
    torch.manual_seed(0)
    return Detector().double().to(root)


FORMS: dict[str, Callable[[nn.Module, list], Any]] = {
    **each_form.FORMS,
    "uneven": lambda net, slots: DataParallel(net, slots, chunk_sizes=[1, 4, 2]),
    "one slot": lambda net, slots: DataParallel(net, slots[:1]),
}


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.detach().cpu(), wanted.detach().cpu(), rtol=1e-9, atol=1e-9)


def grads(module: nn.Module) -> list[Tensor]:
    return [each_form.whole(parameter.grad) for parameter in module.parameters()]


@pytest.mark.parametrize("form", FORMS)
def test_a_detector_trains_and_detects_as_on_one_device(form: str, net: Detector, slots: list, root: Any) -> None:
    alone = copy.deepcopy(net)
    model = FORMS[form](net, slots)
    images, targets = batch()
    own_images, own_targets = batch(root)
    leaf = images[3].requires_grad_()
    own_leaf = own_images[3].requires_grad_()
    for _ in range(3):
        losses = model(samples(images), targets=samples(targets))
        expected = alone(own_images, own_targets)
        for name in expected:
            close(losses[name].sum(), expected[name])
        sum(loss.sum() for loss in losses.values()).backward()
        sum(expected.values()).backward()
        for found, wanted in zip(grads(net), grads(alone), strict=True):
            close(found, wanted)
        close(leaf.grad, own_leaf.grad)
    detections = model(samples(images))
    assert len(detections) == SAMPLES
    wanted_detections = alone(own_images)
    for found, wanted in zip(detections, wanted_detections, strict=True):
        assert found["count"] == wanted["count"]
        assert found["boxes"].device == root
        close(found["boxes"], wanted["boxes"])
    for each in (detections, wanted_detections):  # gradients come through what gather has joined
        sum((one["boxes"] ** 2).sum() * (i + 1) for i, one in enumerate(each)).backward()
    for found, wanted in zip(grads(net), grads(alone), strict=True):
        close(found, wanted)


class WithErrors(nn.Module):
    """It returns the mean over samples of the errors of all their boxes, and the detections."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Any, targets: Any) -> Any:
        found = self.detector(images)
        targets = targets["all"] if isinstance(targets, dict) else targets
        errors = [((one["boxes"] - other["boxes"]) ** 2).sum() for one, other in zip(found, targets, strict=True)]
        return torch.stack(errors).mean(), found


@each_form.replicating_forms
@pytest.mark.parametrize("nested", [False, True])
def test_a_loss_on_the_replicas_counts_samples(form: Any, nested: bool, net: Detector, slots: list, root: Any) -> None:
    alone = copy.deepcopy(net)
    model = form(WithErrors(net), slots, scalars="mean")
    images, targets = batch(root)
    marked: Any = {"all": samples(targets)} if nested else samples(targets)
    loss, detections = model(samples(images), marked)
    expected, _ = WithErrors(alone)(samples(images), targets)
    close(loss, expected)
    assert [each["count"] for each in detections] == [2 * (i + 1) for i in range(SAMPLES)]
    loss.backward()
    expected.backward()
    for found, wanted in zip(grads(net), grads(alone), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("marks", ["in the loader", "in the loop"])
def test_prefetched_batches_hold_samples(marks: str, net: Detector, slots: list, root: Any) -> None:
    model = DataParallel(net, slots)
    batches = [batch(count=count) for count in (7, 5, 2)]
    loader = (
        [(samples(images), samples(targets)) for images, targets in batches] if marks == "in the loader" else batches
    )
    for (images, targets), own in zip(dataparallel.prefetch(loader, model), batches, strict=True):
        losses = model(samples(images), samples(targets))
        expected = net(*([each.to(root) for each in own[0]], [{"boxes": t["boxes"].to(root)} for t in own[1]]))
        close(losses["boxes"].sum(), expected["boxes"])
