"""Training steps of several models, in a process of its own: what they launch, copy, allocate and return.

``python -m planned_steps True NAME...`` runs these models with kernels, ``False`` without, and prints the figures as
JSON. The models are those of `graphed_models`. ``nogpu/simulated/test_skipped.py`` compares the two.
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
from torch.utils._pytree import tree_leaves, tree_map

from dataparallel import DataParallel
from dataparallel.composable import replicate
from dataparallel.testing.steps import mean_square_loss
from graphed_models import MODELS
from nogpu import simulate
from sharded_steps import on_device

SLOTS = 3


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, foreach=True)


class Case(NamedTuple):
    model: str
    optimizer: Callable[..., torch.optim.Optimizer]
    memory_format: torch.memory_format = torch.preserve_format
    autocast: bool = False


CASES = {
    "images": Case("resnet", sgd),
    "images-channels_last": Case("resnet", sgd, torch.channels_last),
    "images-autocast": Case("resnet", adam, autocast=True),
    "gpt": Case("gpt with tied weights", adam),
    "bert": Case("bert", adam),
    "lstm": Case("lstm and gru", sgd),
}


def described(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype), str(tensor.device)]


def in_float(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree)


def figures(case: Case, wrap: Callable[[nn.Module], Any], devices: list[torch.device]) -> dict[str, Any]:
    """Of two steps, because the first one makes what later ones use again."""
    gc.collect()
    start = [torch.sim.memory_allocated(device) for device in devices]
    module = on_device(MODELS[case.model].build, devices[0]).float()
    module.to(memory_format=case.memory_format)
    model, optimizer = wrap(module), case.optimizer(module.parameters())
    args, kwargs = in_float(MODELS[case.model].batch(7, 0))
    result: dict[str, Any] = {}
    for number in range(2):
        for device in devices:
            torch.sim.reset_peak_memory_stats(device)
        with torch.sim.counted() as counts:
            with torch.autocast("sim", torch.bfloat16, enabled=case.autocast):
                output = model(*args, **kwargs)
                loss = mean_square_loss(output)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            for device in devices:
                torch.sim.synchronize(device)
        result |= {
            f"launches {number}": counts.launches,
            f"copied {number}": sorted((origin, target, size) for (origin, target), size in counts.copied.items()),
            f"output {number}": [described(leaf) for leaf in tree_leaves(output)],
            f"gradients {number}": {name: described(p.grad) for name, p in module.named_parameters()},
            f"peak {number}": [torch.sim.max_memory_allocated(d) - s for d, s in zip(devices, start, strict=True)],
        }
        del output, loss
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
        "cross entropy": lambda: F.cross_entropy(made(4, 8), torch.zeros(4, dtype=torch.int64, device=device)),
        "pools": lambda: F.avg_pool2d(F.max_pool2d(made(2, 8, 9, 9), 3, 2, 1), 2).relu_(),
        "dropout": lambda: F.dropout(made(4, 8), 0.1) + F.dropout(made(4, 8), 0.0),
        "lstm": lambda: nn.LSTM(8, 6, 2, bidirectional=True, dropout=0.3, device=device)(made(4, 3, 8))[0],
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
