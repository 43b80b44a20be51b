"""A model and steps that FSDP2 and `dataparallel.composable.fully_shard` both run, and a process that runs FSDP2.

``python beside_fsdp2.py RANK FILE OUT`` is one of two processes with gloo. It trains the model with each of `WAYS` on
its half of each batch, and the first process saves the whole parameters and gradients to the file OUT.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

RANKS, STEPS, SAMPLES = 2, 5, 4
HALF, SINGLE = torch.bfloat16, torch.float32


class Layer(nn.Module):
    """A layer with a buffer. ``seen``: the dtypes of its input, weight and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.randn(8))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen[:] = [x.dtype, self.linear.weight.dtype, self.shift.dtype]
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype)) + self.shift)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.last = nn.Linear(8, 3)

    def units(self) -> list[nn.Module]:
        return [*self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x.to(self.last.weight.dtype))


def batch(step: int) -> Tensor:
    return torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step))


@dataclass(frozen=True)
class Way:
    """Fields of the policies. Only the root casts its output. ``offloads`` is `None`, or if host memory is pinned."""

    precision: dict[str, Any] = field(default_factory=dict)
    offloads: bool | None = None

    def shard(self, model: Any, form: Callable[..., Any], policy: Callable[..., Any], **options: Any) -> Any:
        """Applies ``form`` to the units of the model, then to the model."""
        below = {name: value for name, value in self.precision.items() if name != "output_dtype"}
        for unit in model.units():
            form(unit, mp_policy=policy(**below), **options)
        return form(model, mp_policy=policy(**self.precision), **options)


WAYS = {
    "as it is": Way(),
    "bf16 and fp32 sums": Way({"param_dtype": HALF, "reduce_dtype": SINGLE}),
    "bf16": Way({"param_dtype": HALF}),
    "fp32 and bf16 sums": Way({"reduce_dtype": HALF}),
    "fp32 outputs": Way({"param_dtype": HALF, "reduce_dtype": SINGLE, "output_dtype": SINGLE}),
    "inputs as they are": Way({"param_dtype": HALF, "reduce_dtype": SINGLE, "cast_forward_inputs": False}),
    "offloaded": Way(offloads=False),
    "offloaded, bf16 and fp32 sums": Way({"param_dtype": HALF, "reduce_dtype": SINGLE}, offloads=False),
}


@dataclass
class Trained:
    """After each step: gradients and output. At the end: parameters, and the dtypes that a layer has seen."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)


def train(
    model: Any, part: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor], clip: float = 0.1
) -> Trained:
    """Five steps of AdamW with clipped gradients. The loss is a mean."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = Trained()
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(part(batch(step)))
        trained.outputs.append(output.detach().cpu())
        output.float().square().mean().backward()
        trained.gradients.append({name: whole(p.grad) for name, p in model.named_parameters()})
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    trained.parameters = {name: whole(p) for name, p in model.named_parameters()}
    trained.seen = model.layers[0].seen
    return trained


def train_by_fsdp2(way: Way, rank: int) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    offload = OffloadPolicy() if way.offloads is None else CPUOffloadPolicy(pin_memory=way.offloads)
    mesh, model = init_device_mesh("cpu", (RANKS,)), Net()
    way.shard(model, fully_shard, MixedPrecisionPolicy, mesh=mesh, offload_policy=offload)
    return train(model, lambda x: x.chunk(RANKS)[rank], lambda tensor: tensor.detach().full_tensor().clone())


def main(rank: int, file: str, out: str) -> None:
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS, timeout=timedelta(minutes=2)
    )
    results = {name: vars(train_by_fsdp2(way, rank)) for name, way in WAYS.items()}
    if rank == 0:
        torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
