"""Finds squares and discs in images of several sizes. A batch is a list of images and a list of targets.

    python examples/detector.py

A list with one entry for each sample is marked with ``dataparallel.samples``, and each replica gets a part of it. The
model returns its own loss, and ``scalars="mean"`` makes the loss of the batch from those of the replicas. It takes all
accelerators; without any, two slots on the CPU. The images are drawn here.
"""

import torch
from torch import nn

from dataparallel import DataParallel, samples

slots = list(range(torch.accelerator.device_count())) or ["cpu", "cpu"]
device = torch.device(slots[0])
STRIDE = 4  # pixels of a cell


def draw():
    """An image ``(1, height, width)`` with a square (label 0) or a disc (label 1), and its target."""
    height, width = (STRIDE * torch.randint(6, 10, (2,))).tolist()
    size, label = int(torch.randint(8, 21, ())), torch.randint(2, ())
    x, y = (int(torch.randint(side - size + 1, ())) for side in (width, height))
    rows, columns = (torch.arange(n) - start - size / 2 + 0.5 for n, start in ((height, y), (width, x)))
    distance = torch.hypot(rows[:, None], columns) if label else torch.maximum(rows.abs()[:, None], columns.abs())
    image = (distance < size / 2) + 0.2 * torch.randn(1, height, width)
    return image, {"box": torch.tensor([x, y, x + size, y + size]), "label": label}


class Detector(nn.Module):
    """For each cell: is the centre of the object in it, where are the sides of its box, and what is it."""

    def __init__(self):
        super().__init__()
        layers = []
        for inputs, outputs, stride in ((1, 16, 2), (16, 32, 2), (32, 32, 1), (32, 32, 1)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(32, 7, 1))

    def forward(self, images, targets=None):
        """The mean loss of the images; without targets, a box and a label for each image."""
        found = [self.layers(image[None])[0] for image in images]  # (7, rows, columns) for each image
        if targets is None:
            return samples([self.best(cells) for cells in found])
        return torch.stack([self.loss(*each) for each in zip(found, targets)]).mean()

    def loss(self, cells, target):
        """Of one image."""
        box = target["box"]
        column, row = ((box[:2] + box[2:]) // (2 * STRIDE)).tolist()
        is_there = nn.functional.cross_entropy(cells[0].flatten(), torch.tensor(row * cells.shape[2] + column).to(box))
        sides = nn.functional.l1_loss(cells[1:5, row, column], box / STRIDE - self.corners(row, column).to(box.device))
        return is_there + sides + nn.functional.cross_entropy(cells[5:, row, column], target["label"])

    def best(self, cells):
        """What the cell says in which the object most probably is."""
        row, column = divmod(int(cells[0].argmax()), cells.shape[2])
        box = STRIDE * (cells[1:5, row, column] + self.corners(row, column).to(cells))
        return {"box": box, "label": cells[5:, row, column].argmax()}

    def corners(self, row, column):
        """The middle of a cell, for both corners of a box."""
        return torch.tensor([column, row, column, row]) + 0.5


def overlap(one, other):
    """The intersection of two boxes divided by their union."""
    both = (torch.minimum(one[2:], other[2:]) - torch.maximum(one[:2], other[:2])).clamp(min=0).prod()
    return both / ((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - both)


torch.manual_seed(0)
model = DataParallel(Detector().to(device), slots, scalars="mean")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(101):
    images, targets = zip(*(draw() for _ in range(16)))
    loss = model(samples(images), samples(targets))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step:3}: loss {loss:.3f}")

images, targets = zip(*(draw() for _ in range(100)))
with torch.no_grad():
    found = model(samples(images))
hits = [overlap(a["box"].cpu(), b["box"]) > 0.5 and a["label"].cpu() == b["label"] for a, b in zip(found, targets)]
print(f"found {sum(map(bool, hits))} of {len(hits)} objects (label right, boxes overlap by more than half)")
