"""A detector of torchvision: lists of images and targets, one entry for each sample, are split over the slots."""

import pytest
import torch

pytest.importorskip("torchvision")

from detectors import CLASSES, SIZES, Marked, anchors, backbone, batch, in_float64, same_sizes
from either_form import both_forms, in_form
from torchvision.models.detection import RetinaNet, retinanet
from torchvision.ops import box_iou

from dataparallel import samples


def detector():
    """RetinaNet on one small map of features."""
    few = {"score_thresh": 0.0, "topk_candidates": 20, "detections_per_img": 5}
    return Marked(RetinaNet(backbone(), CLASSES, anchor_generator=anchors(), **SIZES, **few))


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
    with in_float64():
        yield


@both_forms
@pytest.mark.slots(1, 2, 3)
def test_losses_weighted_by_images_are_those_of_one_device(form, slots, root):
    """RetinaNet divides the loss of each image by what is in it, and takes the mean over images."""
    model = detector().to(root)
    images, targets = batch(7, root)
    images = same_sizes(images)
    expected = model(images, targets)
    sum(expected.values()).backward()
    wrapped = in_form(form, detector().to(root), slots)
    losses = wrapped(samples(images), samples(targets))
    counts = torch.tensor([len(chunk) for chunk in torch.arange(7).chunk(len(slots))]).to(root)
    found = {name: (values * counts).sum() / 7 for name, values in losses.items()} if len(slots) > 1 else losses
    sum(found.values()).backward()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(wrapped.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


@both_forms
@pytest.mark.slots(1, 2, 3)
def test_detections_are_gathered_image_by_image(form, slots, root):
    model, (images, _) = detector().to(root).eval(), batch(7, root)
    chunks = [images[at : at + size] for at, size in _places(len(images), len(slots))]
    wrapped = in_form(form, model, slots)
    with torch.no_grad():
        found = wrapped(samples(images))
        expected = [one for chunk in chunks for one in model(chunk)]
    assert [len(one["boxes"]) for one in found] == [5] * 7
    for ours, theirs in zip(found, expected, strict=True):
        assert [*ours] == [*theirs]
        for name in theirs:
            assert ours[name].device == torch.device(root)
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-9)


def _places(count, slots):
    """The first image and the number of images of each slot."""
    sizes = [len(chunk) for chunk in torch.arange(count).chunk(slots)]
    return [(sum(sizes[:slot]), size) for slot, size in enumerate(sizes)]
