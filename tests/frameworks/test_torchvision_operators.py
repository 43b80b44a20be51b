"""torchvision's compiled operators on CUDA devices, beside the CPU."""

import pytest
import torch

pytest.importorskip("torchvision")

from torchvision import ops

from nogpu.cuda import is_stand_in

pytestmark = pytest.mark.devices("cuda")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def boxes(count):
    corners = 10 * torch.rand(count, 2)
    return torch.cat([corners, corners + 1 + 5 * torch.rand(count, 2)], 1)


def regions(count):
    """Boxes of two images, with the index of the image."""
    return torch.cat([torch.arange(count).remainder(2)[:, None], boxes(count)], 1)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_nms(threshold, root):
    places, scores = boxes(40), torch.rand(40)
    kept = ops.nms(places.to(root), scores.to(root), threshold)
    assert kept.device == root
    assert kept.tolist() == ops.nms(places, scores, threshold).tolist()


REGIONS = {
    "roi_align": lambda x, places: ops.roi_align(x, places, 2, 0.5, 2, True),
    "roi_pool": lambda x, places: ops.roi_pool(x, places, 2, 0.5),
    "ps_roi_align": lambda x, places: ops.ps_roi_align(x, places, 2, 0.5, 2),
    "ps_roi_pool": lambda x, places: ops.ps_roi_pool(x, places, 2, 0.5),
}


def assert_same_with_gradients(function, inputs, root):
    here = [x.clone().requires_grad_() for x in inputs]
    there = [x.to(root).requires_grad_() for x in inputs]
    expected, found = function(*here), function(*there)
    assert found.device == root
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    for result in (expected, found):
        result.square().sum().backward()
    for ours, theirs in zip(there, here, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REGIONS)
def test_regions(name, root):
    places = regions(5)
    assert_same_with_gradients(lambda x: REGIONS[name](x, places.to(x.device)), [torch.randn(2, 8, 16, 16)], root)


def test_deformable_convolution(root):
    inputs = [torch.randn(2, 3, 6, 6), torch.randn(2, 18, 4, 4), torch.randn(4, 3, 3, 3), torch.randn(2, 9, 4, 4)]
    assert_same_with_gradients(lambda x, offset, w, mask: ops.deform_conv2d(x, offset, w, mask=mask), inputs, root)


@pytest.mark.skipif(not is_stand_in(), reason="a GPU has no clocks")
def test_the_clocks_know_what_is_read(root):
    scores, places = torch.rand(40).to(root), boxes(40).to(root)
    places += 1
    words = "race: torchvision::nms reads its argument 'dets'"
    with torch.cuda.stream(torch.cuda.Stream(root)), pytest.raises(RuntimeError, match=words):
        ops.nms(places, scores, 0.5)
