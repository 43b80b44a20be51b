"""Trains a detector. The first GPU gets a smaller part of each batch, and the loss is computed inside the wrapper.

The wrapper copies chunks on streams of its own, and hands out lists that it splits itself.
"""

import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.parallel._functions import Scatter, _get_stream

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def own_scatter(obj, gpus, sizes):
    if isinstance(obj, torch.Tensor):
        return Scatter.apply(gpus, sizes, 0, obj)
    if isinstance(obj, tuple):
        return list(zip(*(own_scatter(part, gpus, sizes) for part in obj), strict=False))
    if isinstance(obj, dict):
        parts = zip(*(own_scatter(part, gpus, sizes) for part in obj.values()), strict=False)
        return [dict(zip(obj, values, strict=False)) for values in parts]
    if isinstance(obj, list):  # one entry for each sample
        chunks, start = [], 0
        for gpu, size in zip(gpus, sizes, strict=False):
            chunks.append([entry.to(f"cuda:{gpu}", non_blocking=True) for entry in obj[start : start + size]])
            start += size
        return chunks
    return [obj for _ in gpus]


class UnevenDataParallel(DataParallel):
    def __init__(self, module, device_ids, chunk_sizes):
        super().__init__(module, device_ids)
        self.chunk_sizes = chunk_sizes

    def scatter(self, inputs, kwargs, device_ids):
        assert _get_stream(torch.device("cuda", device_ids[0])) is not None
        inputs = own_scatter(inputs, device_ids, self.chunk_sizes)
        return inputs, own_scatter(kwargs, device_ids, self.chunk_sizes) if kwargs else [{}] * len(inputs)


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.heads = nn.ModuleDict({"centers": nn.Conv2d(8, 1, 1), "sizes": nn.Conv2d(8, 2, 1)})

    def forward(self, images, boxes):
        features = self.backbone(images)
        found = {name: head(features) for name, head in self.heads.items()}
        centers = torch.stack([self.target(entry, images.shape[-2:]) for entry in boxes])
        loss = nn.functional.binary_cross_entropy_with_logits(found["centers"][:, 0], centers)
        sizes = torch.stack([entry[:, 2:].mean(0) for entry in boxes])
        stats = {"centers": loss, "sizes": (found["sizes"].mean((2, 3)) - sizes).abs().mean()}
        return found, loss + stats["sizes"], stats

    def target(self, boxes, shape):
        heat = torch.zeros(shape, device=boxes.device)
        heat[boxes[:, 1].long(), boxes[:, 0].long()] = 1
        return heat


gpus = list(range(torch.cuda.device_count()))
sizes = [1] + [3] * (len(gpus) - 1)
model = UnevenDataParallel(WithLoss(), gpus, sizes).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(4):
    images = torch.randn(sum(sizes), 3, 8, 8)
    boxes = [torch.rand(2 + i % 3, 4) * 7 for i in range(sum(sizes))]
    _, loss, stats = model(images, [entry for entry in boxes]) if step % 2 else model(images, boxes=boxes)
    optimizer.zero_grad()
    loss.mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step}: loss {loss.mean().item():.9f} sizes {stats['sizes'].mean().item():.9f} of {len(loss)} GPUs")
print(f"running mean {model.module.backbone[1].running_mean.sum().item():.9f}")
