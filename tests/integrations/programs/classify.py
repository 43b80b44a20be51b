"""An image classifier, trained in the way of torch's ImageNet example, with random images. It prints losses."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--arch", choices=["plain", "residual"], default="plain")
parser.add_argument("--device", default="cuda")
parser.add_argument("--device-ids", nargs="*", help="default: all GPUs")
parser.add_argument("--one-device", action="store_true", help="no data parallelism")
parser.add_argument("--double", action="store_true", help="train in float64")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=24)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--checkpoint", default="checkpoint.pth")
parser.add_argument("--resume", action="store_true")


class Plain(nn.Module):
    """Convolutions in ``features``, and most parameters in ``classifier``."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 10))

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)) for _ in range(2)
        )
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.fc(x.mean((2, 3)))


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, count):
        self.sum += value * count
        self.count += count

    @property
    def average(self):
        return self.sum / self.count


def accuracy(output, target, topk=(1,)):
    """The percentage of samples whose class is among the k most probable ones, for each k."""
    with torch.no_grad():
        best = output.topk(max(topk), dim=1).indices
        right = best == target.unsqueeze(1)
        return [100 * right[:, :k].any(dim=1).to(output.dtype).mean().item() for k in topk]


def build(args):
    model = {"plain": Plain, "residual": Residual}[args.arch]()
    if args.one_device:
        return model.to(args.device)
    if args.arch == "plain":
        model.features = nn.DataParallel(model.features, args.device_ids)
        return model.to(args.device)
    return nn.DataParallel(model, args.device_ids).to(args.device)


def run_epoch(loader, model, criterion, device, optimizer=None):
    losses, top1, top5 = AverageMeter(), AverageMeter(), AverageMeter()
    model.train(optimizer is not None)
    for images, target in loader:
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        best1, best5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(best1, images.size(0))
        top5.update(best5, images.size(0))
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.12f}")
    print(f"mean loss {losses.average:.12f} top1 {top1.average:.3f} top5 {top5.average:.3f}")
    return top1.average


def main(args):
    torch.manual_seed(0)
    model = build(args)
    criterion = nn.CrossEntropyLoss().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    start, best = 0, 0.0
    if args.resume and os.path.isfile(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location=args.device)
        start, best = saved["epoch"], saved["best"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])

    torch.manual_seed(1)
    images, target = torch.randn(64, 3, 8, 8), torch.randint(0, 10, (64,))
    training = DataLoader(TensorDataset(images, target), args.batch_size)  # the last batch is smaller
    validation = DataLoader(TensorDataset(images[:29], target[:29]), args.batch_size)
    for epoch in range(start, args.epochs):
        run_epoch(training, model, criterion, args.device, optimizer)
        with torch.no_grad():
            best = max(best, run_epoch(validation, model, criterion, args.device))
        scheduler.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({"epoch": epoch + 1, "best": best, **state}, args.checkpoint)


if __name__ == "__main__":
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64 if arguments.double else torch.float32)
    main(arguments)
