"""Outputs stay on the GPUs, and a criterion that is a wrapper too computes the loss there, in threads of its own."""

import threading

import torch
from torch import nn
from torch.nn.parallel import DataParallel, replicate
from torch.nn.parallel._functions import Gather
from torch.nn.parallel.parallel_apply import get_a_var
from torch.nn.parallel.scatter_gather import scatter_kwargs

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class KeepsOutputs(DataParallel):
    def gather(self, outputs, output_device):
        return outputs


class ParallelCriterion(DataParallel):
    def forward(self, outputs, *targets):
        targets, _kwargs = scatter_kwargs(targets, {}, self.device_ids, dim=self.dim)
        replicas = replicate(self.module, self.device_ids[: len(outputs)])
        return Gather.apply(self.output_device, 0, *self.in_threads(replicas, outputs, targets)).mean()

    def in_threads(self, replicas, outputs, targets):
        results, lock, recording = {}, threading.Lock(), torch.is_grad_enabled()

        def work(number, replica, output, target):
            torch.set_grad_enabled(recording)
            with torch.cuda.device(get_a_var(output).get_device()):
                loss = replica(output, *target)
            with lock:
                results[number] = loss

        jobs = zip(range(len(outputs)), replicas, outputs, targets, strict=False)
        threads = [threading.Thread(target=work, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[number] for number in range(len(outputs))]


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv2d(3, 6, 3, padding=1)
        self.main, self.auxiliary = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x):
        x = self.encoder(x).relu()
        return self.main(x), self.auxiliary(x)


class TwoLosses(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 1.0, 0.5]))

    def forward(self, outputs, target):
        main, auxiliary = (nn.functional.cross_entropy(output, target, self.weight) for output in outputs)
        return main + 0.4 * auxiliary


model, criterion = KeepsOutputs(Segments()).cuda(), ParallelCriterion(TwoLosses()).cuda()
optimizer = torch.optim.SGD(
    [{"params": model.module.encoder.parameters(), "lr": 0.05}, {"params": model.module.main.parameters()},
     {"params": model.module.auxiliary.parameters()}], lr=0.5
)  # fmt: skip
for step in range(4):
    images, labels = torch.randn(10, 3, 6, 6), torch.randint(4, (10, 6, 6))
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.9f}")
with torch.no_grad():
    outputs = model(images)
    print(f"{len(outputs)} outputs, {sum(main.sum().item() for main, _ in outputs):.9f}")
