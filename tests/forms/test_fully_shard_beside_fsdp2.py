"""Beside FSDP2 on two processes with gloo: the same policies give the same numbers.

Each process computes with its half of a batch, as each slot does here. FSDP2 averages gradients over processes, and
here they are summed. The loss is the mean of the process's half there, and of the whole batch here, so both mean the
same. The factors are powers of two, so they round nothing.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dataparallel import composable
from machine_ranks import on_machines
from sharded_steps import on_device, whole

pytestmark = pytest.mark.long

STEPS, SAMPLES = 5, 4
HALF, SINGLE = torch.bfloat16, torch.float32
HALF_AND_SINGLE = {"param_dtype": HALF, "reduce_dtype": SINGLE}

WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "as it is": ({}, False),
    "bf16 and fp32 sums": (HALF_AND_SINGLE, False),
    "bf16": ({"param_dtype": HALF}, False),
    "fp32 and bf16 sums": ({"reduce_dtype": HALF}, False),
    "fp32 outputs": ({**HALF_AND_SINGLE, "output_dtype": SINGLE}, False),
    "inputs as they are": ({**HALF_AND_SINGLE, "cast_forward_inputs": False}, False),
    "offloaded": ({}, True),
    "offloaded, bf16 and fp32 sums": (HALF_AND_SINGLE, True),
}
"""Fields of the policy, and whether parameters are offloaded. Only the root casts its output."""


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

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x.to(self.last.weight.dtype))


def shard(model: Any, way: str, of: Any, **options: Any) -> None:
    """By the functions and policies of a module."""
    precision, is_offloaded = WAYS[way]
    below = {name: value for name, value in precision.items() if name != "output_dtype"}
    offload = of.CPUOffloadPolicy(pin_memory=False) if is_offloaded else of.OffloadPolicy()
    for layer in model.layers:
        of.fully_shard(layer, mp_policy=of.MixedPrecisionPolicy(**below), offload_policy=offload, **options)
    of.fully_shard(model, mp_policy=of.MixedPrecisionPolicy(**precision), offload_policy=offload, **options)


def train(model: Any, part: Callable[[Tensor], Tensor], full: Callable[[Tensor], Tensor]) -> SimpleNamespace:
    """Steps of AdamW with clipped gradients. The loss is a mean."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = SimpleNamespace(gradients=[], outputs=[], seen=model.layers[0].seen)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(part(torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step))))
        found.outputs.append(output.detach().cpu())
        output.float().square().mean().backward()
        found.gradients.append({name: full(p.grad) for name, p in model.named_parameters()})
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    found.parameters = {name: full(p) for name, p in model.named_parameters()}
    return found


def by_fsdp2(rank: int, devices: list[Any], way: str) -> SimpleNamespace:
    model = Net()
    shard(model, way, fsdp2, mesh=init_device_mesh("cpu", (2,)))
    return train(model, lambda x: x.chunk(2)[rank], lambda tensor: tensor.detach().full_tensor().clone())


@pytest.mark.slots(2)
@pytest.mark.parametrize("way", WAYS)
def test_five_steps_are_those_of_fsdp2(way, slots):
    """On the same kernels to the last bit; 1e-6 leaves room for others.

    FSDP2 runs on the CPU here. AdamW makes whole steps of gradients that are nothing but rounding, so where kernels
    differ only gradients and outputs are compared. FSDP2 rounds each sum to 16 bits if it sums in these, and here only
    what is added is rounded: then the first gradients are compared, to that rounding.

    Inputs and parameters are cast as the policy says, buffers never.
    """
    model = on_device(Net, slots[0])
    shard(model, way, composable, devices=slots)
    found, expected = train(model, lambda x: x.to(slots[0]), whole), on_machines(by_fsdp2, way, slots=1, kind="cpu")[0]
    assert found.seen == expected.seen
    assert found.seen[2] == torch.float32
    precision, _ = WAYS[way]
    if precision.get("reduce_dtype", precision.get("param_dtype")) == HALF:
        assert_near(found.gradients[0], expected.gradients[0], torch.finfo(HALF).eps)
        return
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert_near(ours, theirs)
    if torch.device(slots[0]).type != "cuda":
        assert_near(found.parameters, expected.parameters)
    for output, of_first_half in zip(found.outputs, expected.outputs, strict=True):
        assert output.dtype == of_first_half.dtype
        torch.testing.assert_close(output[: len(of_first_half)], of_first_half)


def assert_near(found: dict[str, Any], expected: dict[str, Any], rounding: float | None = None) -> None:
    """To 1e-6, or to a part of the largest element."""
    assert found.keys() == expected.keys()
    for name, other in expected.items():
        assert found[name].dtype == other.dtype
        atol = 1e-6 if rounding is None else rounding * float(other.abs().max())
        torch.testing.assert_close(found[name], other, rtol=0, atol=atol, msg=name)
