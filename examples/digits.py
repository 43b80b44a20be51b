"""Reads handwritten digits: a network on one device, and the same network on all of them.

    pip install scikit-learn
    python examples/digits.py

Both begin with the same weights and see the same batches, so both learn the same. Only the line with ``DataParallel``
differs. It takes all accelerators; without any, two slots on the CPU, which show what happens but are not faster.
The 1,797 scans come with scikit-learn.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

from dataparallel import DataParallel

slots = list(range(torch.accelerator.device_count())) or ["cpu", "cpu"]
device = torch.device(slots[0])

torch.manual_seed(0)
pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images, labels = pixels.float().view(-1, 1, 8, 8).to(device) / 16, labels.to(device)
train, test = torch.randperm(1797).to(device).split([1440, 357])


def train_epoch(model, optimizer, order):
    """Returns the mean loss of the epoch."""
    losses = []
    for batch in order.split(96):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


@torch.no_grad()
def accuracy(model):
    """The share of the test images that are read correctly."""
    return (model(images[test]).argmax(1) == labels[test]).float().mean().item()


network = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
    nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
).to(device)  # fmt: skip
models = {"one device": copy.deepcopy(network), f"{len(slots)} slots": DataParallel(network, slots)}
optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in models.values()]

print("loss of epoch", *(f"{name:>10}" for name in models))
for epoch in range(8):
    order = train[torch.randperm(len(train)).to(device)]
    losses = [train_epoch(*each, order) for each in zip(models.values(), optimizers)]
    print(f"{epoch:13}", *(f"{loss:10.5f}" for loss in losses))
print("test accuracy", *(f"{accuracy(model):10.1%}" for model in models.values()))
