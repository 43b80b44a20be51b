"""Classes that take the place of the wrapper: one that was copied and changed, one with a second base, one by hand."""

import torch
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate
from torch.nn.parallel.scatter_gather import scatter_kwargs

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Copied(nn.Module):
    """Does what torch's class does, without its checks, and passes a number to the module."""

    def __init__(self, module, device_ids=None, dim=0):
        super().__init__()
        self.device_ids = list(range(torch.cuda.device_count())) if device_ids is None else device_ids
        self.module, self.dim, self.output_device = module, dim, self.device_ids[0]

    def forward(self, *inputs, **kwargs):
        inputs, kwargs = scatter_kwargs(inputs, kwargs, self.device_ids, self.dim)
        replicas = replicate(self.module, self.device_ids[: len(inputs)])
        for number, replica in enumerate(replicas):
            replica.number = number
        outputs = parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])
        return gather(outputs, self.output_device, self.dim)


class Saves:
    saved = ()

    def save(self):
        self.saved += ({name: value.detach().clone() for name, value in self.state_dict().items()},)


class SavingDataParallel(nn.DataParallel, Saves):
    """Names that it lacks are those of the module."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class ByHand(nn.DataParallel):
    def __init__(self, module, gpus):
        super(nn.DataParallel, self).__init__()
        self.module, self.device_ids, self.dim = module, gpus, 0
        self.output_device, self.src_device_obj = gpus[-1], torch.device("cuda", gpus[0])


class Net(nn.Module):
    number = 0

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 7), nn.Linear(7, 2)
        self.classes = 2

    def forward(self, x, temperature=1.0):
        return self.outer(self.inner(x).tanh()) / temperature + self.number


for cls in (Copied, SavingDataParallel, lambda module: ByHand(module, [0, 1])):
    torch.manual_seed(2)
    model = cls(Net().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        x = torch.randn(8, 5).cuda()
        output = model(x, temperature=2.0)
        loss = output.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{type(model).__name__} {step}: loss {loss.item():.9f} on GPU {output.get_device()}")
    if isinstance(model, Saves):
        model.save()
        total = sum(value.sum().item() for value in model.saved[0].values())
        print(f"{len(model.saved)} saved, {model.classes} classes, {total:.9f}")
