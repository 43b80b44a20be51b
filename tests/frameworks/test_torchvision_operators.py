"""Compiled operators of torchvision on CUDA devices, beside the CPU."""

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


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_nms(threshold, root):
    places, scores = boxes(40), torch.rand(40)
    kept = ops.nms(places.to(root), scores.to(root), threshold)
    assert kept.device == root
    assert kept.tolist() == ops.nms(places, scores, threshold).tolist()


def test_roi_align_and_its_gradient(root):
    places = torch.cat([torch.arange(5).remainder(2)[:, None], boxes(5)], 1)
    here = torch.randn(2, 8, 16, 16, requires_grad=True)
    there = here.detach().to(root).requires_grad_()
    expected, found = (ops.roi_align(x, places.to(x.device), 2, 0.5, 2, True) for x in (here, there))
    assert found.device == root
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    for result in (expected, found):
        result.square().sum().backward()
    torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not is_stand_in(), reason="a GPU has no clocks")
def test_the_clocks_know_what_is_read(root):
    scores, places = torch.rand(40).to(root), boxes(40).to(root)
    places += 1
    words = "race: torchvision::nms reads its argument 'dets'"
    with torch.cuda.stream(torch.cuda.Stream(root)), pytest.raises(RuntimeError, match=words):
        ops.nms(places, scores, 0.5)
