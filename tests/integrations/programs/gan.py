"""Trains a generator and a critic with a gradient penalty. Gradients are clamped, and optimizers are wrapped too."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Critic(nn.Module):
    """Counts its batches in a buffer. The head for classes is not used."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 4))
        self.classes = nn.Linear(16, 3)
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.batches += 1
        return self.body(x).flatten(1)


class Gan(nn.Module):
    """The networks are in one list, and each has its optimizer as an attribute."""

    def __init__(self):
        super().__init__()
        generator = nn.Sequential(nn.Linear(4, 36), nn.Tanh(), nn.Unflatten(1, (1, 6, 6)))
        self.networks = nn.ModuleList(nn.DataParallel(network) for network in (generator, Critic()))
        self.cuda()
        self.optimizers = [torch.optim.Adam(network.parameters(), lr=0.01) for network in self.networks]
        self.wrapped = nn.DataParallel(self.optimizers[0])


gan = Gan()
generator, critic = gan.networks
for step in range(4):
    real, noise = torch.randn(8, 1, 6, 6).cuda(), torch.randn(8, 4).cuda()
    fake = generator(noise)
    mixed = (real + fake.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
    critic.zero_grad()
    loss.backward()
    norms = [parameter.grad.data.clamp_(-0.5, 0.5).norm().item() for parameter in critic.parameters()]
    gan.optimizers[1].step()
    gradients = torch.autograd.grad(-critic(generator(noise)).mean(), [*generator.parameters(), *critic.parameters()])
    for parameter, gradient in zip(generator.parameters(), gradients, strict=False):
        parameter.grad = gradient
    gan.wrapped.module.step()
    print(f"step {step}: loss {loss.item():.9f} penalty {penalty.item():.9f} norms {sum(norms):.9f}")
print(f"{critic.module.batches.item()} batches, {critic.module.classes.weight.grad.abs().sum().item():.1f} of no use")

many = nn.DataParallel(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])).cuda()
shape = many.module[1](torch.ones(1, 2).cuda()).shape
print(f"{len(many.module)} in a wrapped list, {shape}, {len(list(many.parameters()))} parameters")
