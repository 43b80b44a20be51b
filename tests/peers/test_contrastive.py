"""A contrastive loss over all samples, as CLIP has it, equals that of one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dataparallel import DataParallel, peers
from dataparallel.composable import fully_shard, replicate


class Contrastive(nn.Module):
    """Compares each image with all texts, and each text with all images. Returns one loss a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(5, 4), nn.Linear(3, 4)

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        images, texts = F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)
        all_images, all_texts = peers.all_gather((images, texts))
        sizes = peers.all_gather(torch.tensor([len(images)], device=images.device))
        rows = sizes[: peers.index()].sum() + torch.arange(len(images), device=images.device)
        one_way = F.cross_entropy(images @ all_texts.T * 3, rows, reduction="none")
        return one_way + F.cross_entropy(texts @ all_images.T * 3, rows, reduction="none")


@pytest.mark.slots(2, 3, 8)
@pytest.mark.parametrize("form", [DataParallel, replicate, fully_shard])
def test_loss_and_gradients(slots, form):
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Contrastive().double().to(slots[0])
        images, texts = torch.randn(17, 5).double().to(slots[0]), torch.randn(17, 3).double().to(slots[0])
        if wrapped:
            model = DataParallel(model, slots) if form is DataParallel else form(model, devices=slots)
        loss = model(images, texts).mean()
        loss.backward()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        results.append([loss.detach(), *grads])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
