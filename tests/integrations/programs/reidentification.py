"""A wrapper inside a model, losses of pairs over the gathered batch, and files: whole models and state dicts."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Reidentifies(nn.Module):
    def __init__(self):
        super().__init__()
        backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.backbone = nn.DataParallel(backbone)
        self.classifier = nn.Linear(8, 5, bias=False)
        self.centers = nn.Parameter(torch.randn(5, 8))

    def forward(self, images):
        features = self.backbone(images).flatten(1)
        return features if not self.training else (features, self.classifier(features))


def triplet(features, people):
    distances = torch.cdist(features, features)
    same = people[:, None] == people[None]
    farthest = distances.masked_fill(~same, 0).amax(1)
    nearest = distances.masked_fill(same, 1e9).amin(1)
    return (farthest - nearest + 0.3).relu().mean()


model = Reidentifies().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.1)
for epoch in range(4):
    model.train()
    people = torch.arange(5).repeat_interleave(2).cuda()
    images = torch.randn(10, 3, 9, 9).cuda()
    features, scores = model(images)
    centers = (features - model.centers[people]).square().sum(1).mean()
    loss = nn.functional.cross_entropy(scores, people) + triplet(features, people) + 5e-4 * centers
    optimizer.zero_grad()
    loss.backward()
    model.centers.grad.data *= 1 / 5e-4
    optimizer.step()
    scheduler.step()
    print(f"epoch {epoch}: loss {loss.item():.9f}")

model.eval()
with torch.no_grad():
    before = model(images)
torch.save(model.backbone, "whole.pth")
torch.save({"state": model.state_dict(), "optimizer": optimizer.state_dict()}, "state.pth")
model.backbone = torch.load("whole.pth", weights_only=False)
with torch.no_grad():
    print(f"features {before.sum().item():.9f} whole {(model(images) - before).abs().max().item():.9f}")
again = Reidentifies().cuda().eval()
again.load_state_dict(torch.load("state.pth")["state"])
without = {name.replace("module.", ""): value for name, value in model.backbone.state_dict().items()}
again.backbone.module.load_state_dict(without)
mean = again.backbone.module[1].running_mean.sum()
with torch.no_grad():
    print(f"state {(again(images) - before).abs().max().item():.9f} mean {mean:.9f}")
