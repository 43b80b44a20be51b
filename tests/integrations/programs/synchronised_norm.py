"""Normalises over all GPUs in the old way: callbacks after replication, and queues between the replicas' threads."""

import queue
import threading

import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.parallel._functions import Broadcast, ReduceAddCoalesced

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Exchange:
    """Replicas send sums to the first one, and get those of all from it."""

    def __init__(self):
        self.queue, self.answers, self.lock = queue.Queue(), {}, threading.Lock()

    def register(self, copy):
        with self.lock:
            self.answers[copy] = queue.Queue(1)

    def ask(self, copy, value):
        self.queue.put((copy, value))
        return self.answers[copy].get()

    def collect(self, own, combine):
        others = [self.queue.get() for _ in range(len(self.answers))]
        combined = combine([(0, own), *others])
        for copy, value in combined[1:]:
            self.answers[copy].put(value)
        return combined[0][1]


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.exchange, self.copy = Exchange(), 0

    def after_replication(self, context, copy):
        self.copy = copy
        if copy == 0:
            context["exchange"] = self.exchange = Exchange()
        else:
            self.exchange = context["exchange"]
            self.exchange.register(copy)

    def forward(self, x):
        if not self.training:
            return (x - self.mean) * self.weight
        sums = (x.sum(0), torch.full((1,), float(len(x)), device=x.device))
        own = self.exchange.collect(sums, self.combine) if self.copy == 0 else self.exchange.ask(self.copy, sums)
        mean = own[0]
        if self.copy == 0:
            self.mean.mul_(0.5).add_(mean.detach(), alpha=0.5)
        return (x - mean) * self.weight

    def combine(self, messages):
        messages = sorted(messages, key=lambda message: message[0])
        devices = [sums[0].get_device() for _, sums in messages]
        total, count = ReduceAddCoalesced.apply(devices[0], 2, *[part for _, sums in messages for part in sums])
        copies = Broadcast.apply(devices, total / count)
        return [(copy, (mean,)) for (copy, _), mean in zip(messages, copies, strict=False)]


def call_back(replicas):
    contexts = [{} for _ in replicas[0].modules()]
    for copy, replica in enumerate(replicas):
        for context, module in zip(contexts, replica.modules(), strict=False):
            if hasattr(module, "after_replication"):
                module.after_replication(context, copy)


class WithCallbacks(DataParallel):
    def replicate(self, module, device_ids):
        replicas = super().replicate(module, device_ids)
        call_back(replicas)
        return replicas


def patched(wrapper):
    """For a wrapper that exists: its method is replaced on the instance."""
    original = wrapper.replicate

    def replicate(module, device_ids):
        replicas = original(module, device_ids)
        call_back(replicas)
        return replicas

    wrapper.replicate = replicate
    return wrapper


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), Norm(8), nn.Tanh(), Norm(8), nn.Linear(8, 3)).cuda()


for make in (WithCallbacks, lambda module: patched(DataParallel(module))):
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(3):
        x, y = torch.randn(13, 6).cuda(), torch.randint(3, (13,)).cuda()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.9f} mean {model.module[1].mean.sum().item():.9f}")
    model.eval()
    print(f"evaluation {model(x).sum().item():.9f}")
