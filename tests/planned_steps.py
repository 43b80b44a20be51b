"""Training steps of several models, in a process of its own: what they launch, copy, allocate and return.

``python -m planned_steps True NAME...`` runs these models with kernels, ``False`` without, and prints the figures as
JSON. ``nogpu/simulated/test_skipped.py`` compares the two.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dataparallel import DataParallel
from dataparallel.composable import replicate
from nogpu import simulate

SLOTS = 3


class Images(nn.Sequential):
    """Residual blocks with BatchNorm between poolings."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
            self.conv2, self.bn2 = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True))))

    def __init__(self) -> None:
        stem = [
            nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        middle = [self.Block(8), nn.AvgPool2d(2), nn.GroupNorm(2, 8), self.Block(8)]
        super().__init__(*stem, *middle, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


class Attention(nn.Module):
    """Causal if asked, with a mask for padding otherwise."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Tokens(nn.Module):
    """Blocks of attention: like GPT if causal, with tied embeddings; like BERT otherwise, with a mask and dropout."""

    def __init__(self, causal: bool, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.causal = causal
        self.tokens, self.positions = nn.Embedding(32, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            block = nn.ModuleDict({"ln1": nn.LayerNorm(width), "attention": Attention(width, 2, causal)})
            block["ln2"] = nn.LayerNorm(width)
            block["mlp"] = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            block["dropout"] = nn.Dropout(0.0 if causal else 0.1)
            self.blocks.append(block)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        mask = None if self.causal else (tokens != 0)[:, None, None, :]
        for block in self.blocks:
            x = x + block["dropout"](block["attention"](block["ln1"](x), mask))
            x = x + block["dropout"](block["mlp"](block["ln2"](x)))
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8, padding_idx=0)
        self.layers, self.head = nn.LSTM(8, 6, num_layers=2, bidirectional=True, dropout=0.3), nn.Linear(12, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens).transpose(0, 1))[0].transpose(0, 1))


def images() -> Tensor:
    return torch.randn(7, 3, 32, 32)


def tokens() -> Tensor:
    return torch.randint(0, 32, (7, 12))


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    autocast: bool = False
    training: bool = True


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, foreach=True)


CASES = {
    "images": Case(Images, images, sgd),
    "images-channels_last": Case(lambda: Images().to(memory_format=torch.channels_last), images, sgd),
    "images-autocast": Case(Images, images, adam, autocast=True),
    "images-eval": Case(Images, images, sgd, training=False),
    "gpt": Case(lambda: Tokens(True), tokens, adam),
    "gpt-autocast": Case(lambda: Tokens(True), tokens, torch.optim.AdamW, autocast=True),
    "bert": Case(lambda: Tokens(False), tokens, adam),
    "lstm": Case(Recurrent, tokens, sgd),
}


def described(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype), str(tensor.device)]


def step(case: Case, model: Any, x: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    with torch.autocast("sim", torch.bfloat16, enabled=case.autocast):
        output = model(x)
        target = torch.zeros(output.shape[:-1], dtype=torch.int64, device=output.device)
        loss = F.cross_entropy(output.flatten(0, -2), target.flatten()) + F.mse_loss(output, torch.zeros_like(output))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return output


def figures(case: Case, wrap: Callable[[nn.Module], Any], devices: list[torch.device]) -> dict[str, Any]:
    """Of two steps, because the first one makes what later ones use again."""
    torch.manual_seed(0)
    gc.collect()
    start = [torch.sim.memory_allocated(device) for device in devices]
    module = case.build().to(devices[0]).train(case.training)
    model, optimizer = wrap(module), case.optimizer(module.parameters())
    x = case.batch()
    result: dict[str, Any] = {}
    for number in range(2):
        for device in devices:
            torch.sim.reset_peak_memory_stats(device)
        with torch.sim.counted() as counts:
            output = step(case, model, x, optimizer)
            for device in devices:
                torch.sim.synchronize(device)
        result |= {
            f"launches {number}": counts.launches,
            f"copied {number}": sorted((origin, target, size) for (origin, target), size in counts.copied.items()),
            f"output {number}": described(output),
            f"gradients {number}": {name: described(p.grad) for name, p in module.named_parameters()},
            f"peak {number}": [torch.sim.max_memory_allocated(d) - s for d, s in zip(devices, start, strict=True)],
        }
        del output
        optimizer.zero_grad()
        gc.collect()
        result[f"memory {number}"] = [torch.sim.memory_allocated(d) - s for d, s in zip(devices, start, strict=True)]
    torch.sim.check_clocks()
    return result


def operators() -> dict[str, Callable[[], Any]]:
    """Operators whose results are others on the CPU than on CUDA, or that are awkward otherwise."""
    device = torch.device("sim:0")

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, device=device).to(dtype).requires_grad_()

    half, offsets = torch.bfloat16, torch.tensor([0, 2, 5], device=device)
    bags = torch.arange(5, device=device)
    images = made(2, 8, 6, 6).detach().to(memory_format=torch.channels_last)
    table = {
        "out": lambda: torch.add(made(5).detach(), 1, out=torch.empty(0, device=device)),
        "resized": lambda: made(5).detach().resize_(100),
        "shares": lambda: made(4, 4).detach().t_().mul_(2).t().view(2, 8)[1:],
        "cpu scalars": lambda: torch.where(made(3) > torch.tensor(0.5), torch.tensor(1.0), torch.tensor(2.0)),
        "empty": lambda: torch.cat([made(0, 3), made(2, 3)]) + made(0, 3).sum(),
        "index": lambda: made(5, 4)[torch.tensor([0, 1]), offsets[:2]],
        "index of the cpu's mask": lambda: made(3)[torch.tensor([True, False, True])],
        "index_put": lambda: made(5, 4).detach().index_put_((offsets[:2],), torch.tensor(0.0)),
        "complex": lambda: torch.fft.rfft(made(6)).conj() * 2,
        "unpool": lambda: F.max_unpool2d(*F.max_pool2d(images, 2, return_indices=True), 2),
        "shuffle": lambda: F.pixel_shuffle(images, 2),
        "pad": lambda: F.pad(images, (1, 1, 1, 1), mode="reflect"),
        "eig": lambda: torch.linalg.eig(made(3, 3).detach()),
        "attention": lambda: F.scaled_dot_product_attention(*(made(1, 2, 4, 8) for _ in range(3))),
        "mask": lambda: F.scaled_dot_product_attention(*(made(1, 2, 4, 8) for _ in range(3)), made(4, 4).detach()),
    }
    for name, normalise in {
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
        "group_norm": lambda x: F.group_norm(x, 2),
    }.items():
        for first, second in ((images, images.contiguous()), (images.contiguous(), images)):
            table[f"gradient of {name} {first.stride()}"] = lambda normalise=normalise, x=first, gradient=second: (
                torch.autograd.grad(normalise(x.requires_grad_()), x, gradient)
            )
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"):
        for dtype in (torch.float32, half):
            loss = getattr(F, name)
            table[f"{name} {dtype}"] = lambda loss=loss, dtype=dtype: loss(
                made(4, 3, dtype=dtype), made(4, 3, dtype=dtype).detach()
            )
    for mode in ("sum", "mean", "max"):
        for dtype in (torch.float32, torch.float64, half):
            for last in (False, True):
                for padding in (None, 1):
                    for weight in (made(6, 4, dtype=dtype), made(6, 4, dtype=dtype).detach()):
                        table[f"bags {mode} {dtype} {last} {padding} {weight.requires_grad}"] = (
                            lambda weight=weight, mode=mode, last=last, padding=padding: F.embedding_bag(
                                bags, weight, offsets, mode=mode, include_last_offset=last, padding_idx=padding
                            )
                        )
    for dtype in (torch.float32, half):
        for scale in (torch.float32, half):
            if (dtype, scale) != (torch.float32, half):
                table[f"layer_norm {dtype} {scale}"] = lambda dtype=dtype, scale=scale: torch.native_layer_norm(
                    made(4, 8, dtype=dtype), [8], made(8, dtype=scale), made(8, dtype=scale), 1e-5
                )
                table[f"group_norm {dtype} {scale}"] = lambda dtype=dtype, scale=scale: torch.native_group_norm(
                    made(4, 8, 2, dtype=dtype), made(8, dtype=scale), made(8, dtype=scale), 4, 8, 2, 2, 1e-5
                )
                for training in (True, False):
                    table[f"batch_norm {dtype} {scale} {training}"] = (
                        lambda dtype=dtype, scale=scale, training=training: torch.native_batch_norm(
                            made(4, 8, 2, dtype=dtype),
                            *(made(8, dtype=scale).detach() for _ in range(4)),
                            training,
                            0.1,
                            1e-5,
                        )
                    )
    return table


def operator_figures(operator: Callable[[], Any]) -> dict[str, Any]:
    gc.collect()
    torch.sim.reset_peak_memory_stats(0)
    start = torch.sim.memory_allocated(0)
    with torch.sim.counted() as counts:
        result = operator()
        tensors = [result] if isinstance(result, Tensor) else list(result)
        forward = torch.sim.memory_allocated(0) - start
        differentiable = [t for t in tensors if t.requires_grad and t.is_floating_point()]
        if differentiable:
            sum(t.float().sum() for t in differentiable).backward()
    return {
        "results": [[*described(t), t.untyped_storage().nbytes(), t.storage_offset()] for t in tensors],
        "launches": counts.launches,
        "memory": forward,
        "peak": torch.sim.max_memory_allocated(0) - start,
    }


def main(compute: bool, names: list[str]) -> None:
    devices = simulate(SLOTS, compute=compute)
    forms: dict[str, Callable[[nn.Module], Any]] = {
        "DataParallel": lambda module: DataParallel(module, devices, serial=True),
        "replicate": lambda module: replicate(module, devices=devices),
    }
    # The order of the threads decides how high memory rises, so there is one thread.
    with torch.autograd.set_multithreading_enabled(False):
        told: dict[str, Any] = {}
        for name in names:
            if name == "operators":
                told[name] = {operator: operator_figures(call) for operator, call in operators().items()}
            else:
                told[name] = {form: figures(CASES[name], wrap, devices) for form, wrap in forms.items()}
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1] == "True", sys.argv[2:])
