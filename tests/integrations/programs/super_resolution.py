"""Calls ``data_parallel`` for training and for parts of a large image, and adds what flipped images give."""

import torch
import torch.nn.parallel as P
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(True), nn.Conv2d(width, width, 1))

    def forward(self, x):
        return x + self.body(x) * 0.1


class Enlarges(nn.Module):
    def __init__(self, width=8, scale=2):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*(Block(width) for _ in range(3)))
        self.tail = nn.Sequential(nn.Conv2d(width, 3 * scale**2, 1), nn.PixelShuffle(scale))

    def set_scale(self, number):
        self.number = number

    def forward(self, x):
        x = self.head(x)
        return self.tail(x + self.body(x))


class Model(nn.Module):
    def __init__(self, gpus):
        super().__init__()
        self.gpus, self.model = gpus, Enlarges().to("cuda")

    def forward(self, x, number=0):
        self.model.set_scale(number)
        if self.training:
            return P.data_parallel(self.model, x, range(self.gpus))
        return self.in_parts(x)

    def in_parts(self, x):
        height, width = (size // 2 for size in x.shape[-2:])
        parts = [x[..., i : i + height, j : j + width] for i in (0, height) for j in (0, width)]
        flipped = [part.flip(3) for part in parts]
        outputs = P.data_parallel(self.model, torch.cat(parts), range(self.gpus)).chunk(4)
        again = P.data_parallel(self.model, torch.cat(flipped), range(self.gpus)).flip(3).chunk(4)
        quarters = [(a + b) / 2 for a, b in zip(outputs, again, strict=False)]
        return torch.cat([torch.cat(quarters[:2], 3), torch.cat(quarters[2:], 3)], 2)


model = Model(torch.cuda.device_count())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(4):
    large = torch.randn(6, 3, 12, 12).cuda()
    small = nn.functional.avg_pool2d(large, 2)
    model.train()
    loss = nn.functional.l1_loss(model(small, step), large)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.9f}")
model.eval()
with torch.no_grad():
    output = model(small[:1])
    print(f"psnr {-10 * (output - large[:1]).square().mean().log10().item():.9f} shape {tuple(output.shape)}")
