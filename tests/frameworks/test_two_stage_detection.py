"""Faster R-CNN of torchvision: its proposals and its pooling are compiled operators of torchvision."""

import copy

import pytest
import torch

pytest.importorskip("torchvision")

from detectors import CLASSES, SIZES, Marked, anchors, backbone, batch, in_float64, same_sizes
from either_form import both_forms, in_form
from torchvision.models.detection import FasterRCNN
from torchvision.ops import MultiScaleRoIAlign

from dataparallel import samples

# The operators know no simulated device.
pytestmark = pytest.mark.devices("cpu", "cuda")

EVERY_BOX = 10_000  # no box is drawn at random: all count


def detector():
    net = FasterRCNN(
        backbone(),
        CLASSES,
        **SIZES,
        rpn_anchor_generator=anchors(),
        rpn_pre_nms_top_n_train=50,
        rpn_pre_nms_top_n_test=50,
        rpn_batch_size_per_image=EVERY_BOX,
        box_roi_pool=MultiScaleRoIAlign(featmap_names=["0"], output_size=2, sampling_ratio=2),
        box_batch_size_per_image=EVERY_BOX,
        box_score_thresh=0.0,
        box_detections_per_img=5,
    )
    return Marked(net)


@pytest.fixture(autouse=True)
def _in_float64():
    with in_float64():
        yield


@both_forms
@pytest.mark.slots(1, 2, 3)
def test_losses_and_gradients_are_those_of_each_chunk_on_the_cpu(form, slots, root):
    """The loss of a batch is divided by all boxes of it, so that of a chunk counts with its own boxes."""
    model = detector()
    wrapped = in_form(form, copy.deepcopy(model).to(root), slots)
    images, targets = batch(6, "cpu")
    images = same_sizes(images)
    each = -(-6 // len(slots))
    expected = [model(images[at : at + each], targets[at : at + each]) for at in range(0, 6, each)]
    expected = {name: torch.stack([losses[name] for losses in expected]) for name in expected[0]}
    sum(values.sum() for values in expected.values()).backward()
    targets = [{name: value.to(root) for name, value in target.items()} for target in targets]
    losses = wrapped(samples([image.to(root) for image in images]), samples(targets))
    sum(values.sum() for values in losses.values()).backward()
    assert sorted(losses) == ["loss_box_reg", "loss_classifier", "loss_objectness", "loss_rpn_box_reg"]
    for name, values in expected.items():
        torch.testing.assert_close(losses[name].cpu().flatten(), values, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(wrapped.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-8, atol=1e-9)


@both_forms
@pytest.mark.slots(1, 2, 3)
def test_detections_are_those_of_each_image_on_the_cpu(form, slots, root):
    model = detector().eval()
    wrapped = in_form(form, copy.deepcopy(model).to(root), slots)
    images = same_sizes(batch(7, "cpu")[0])
    with torch.no_grad():
        expected = model(images)
        found = wrapped(samples([image.to(root) for image in images]))
    assert [len(one["boxes"]) for one in found] == [5] * 7
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            assert ours[name].device == root
            torch.testing.assert_close(ours[name].cpu(), value, rtol=1e-9, atol=1e-9)
