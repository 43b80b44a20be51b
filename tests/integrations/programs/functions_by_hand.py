"""Trains by torch's functions alone: with the private ones of autograd, with the public ones and partials, by one."""

from functools import partial

import torch
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate, scatter
from torch.nn.parallel._functions import Broadcast, Gather, Scatter

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
GPUS = list(range(torch.cuda.device_count()))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x, scale=1.0):
        return torch.tanh(x @ self.weight + self.bias) * scale


def by_private_functions(layer, x):
    count = len(GPUS)
    copies = Broadcast.apply(GPUS, layer.weight, layer.bias)
    outputs = [
        torch.tanh(chunk @ copies[2 * gpu] + copies[2 * gpu + 1])
        for gpu, chunk in enumerate(Scatter.apply(GPUS, None, 0, x))
    ]
    assert len(copies) == 2 * count
    return Gather.apply(GPUS[0], 0, *outputs)


def by_public_functions(layer, x):
    chunks = scatter(x, GPUS)
    replicas = replicate(layer, GPUS[: len(chunks)])
    halves = [partial(replica, scale=0.5) for replica in replicas]
    once = parallel_apply(replicas, [(chunk,) for chunk in chunks])
    again = parallel_apply(halves, once, [{}] * len(chunks), GPUS[: len(chunks)])
    return gather({"once": once, "again": again}["again"], GPUS[0])


layer = Layer().cuda()
optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
for forward in (by_private_functions, by_public_functions, torch.nn.parallel.data_parallel):
    for batch in (12, 7, 2):
        x = torch.randn(batch, 6).cuda()
        loss = (forward(layer, x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{forward.__name__} {batch}: loss {loss.item():.9f}")
print(f"weights {layer.weight.sum().item():.9f}")
