"""Attention, packed sequences and optimizers compute on a simulated device what they compute on the CPU.

`test_modules` has all modules of torch.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from like_the_cpu import DEVICE, assert_as_on_the_cpu, made, numbers

pytestmark = pytest.mark.devices("sim")


@pytest.mark.parametrize("mask", [None, "boolean", "additive", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_dot_product_attention(mask: str | None, dtype: torch.dtype) -> None:
    q, k, v = (numbers(2, 3, 5, 4, dtype=dtype, seed=seed).requires_grad_() for seed in range(3))
    masks = {"boolean": torch.ones(5, 5).tril().bool(), "additive": numbers(5, 5, dtype=dtype)}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attn_mask = masks[mask].to(q.device) if mask in masks else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=mask == "causal")

    assert_as_on_the_cpu(attention, q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 5), (1, 4, 5, 5), (2, 1, 1, 5)], ids=str)
def test_a_mask_of_attention_gets_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (numbers(2, heads, 5, 4, dtype=dtype, seed=heads).requires_grad_() for heads in (4, 2, 2))
    bias = numbers(*shape, dtype=dtype).requires_grad_()
    attention = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
    assert_as_on_the_cpu(attention, q, k, v, bias)
    if dtype is torch.float64:
        leaves = [value.detach().to(DEVICE).requires_grad_() for value in (q, k, v, bias)]
        assert torch.autograd.gradgradcheck(attention, leaves, fast_mode=True)


def test_only_the_mask_of_attention_gets_a_gradient() -> None:
    q, k, v = (numbers(2, 3, 5, 4, seed=seed) for seed in range(3))
    assert_as_on_the_cpu(F.scaled_dot_product_attention, q, k, v, numbers(5, 5).requires_grad_())


def test_nested_tensors() -> None:
    parts = [numbers(2, 3), numbers(4, 3)]

    def padded(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        nested = torch.nested.nested_tensor([first, second], device=first.device)
        assert nested.device == first.device
        return torch.nested.to_padded_tensor(nested * 2, 0.0), *nested.relu().unbind()

    assert_as_on_the_cpu(padded, *parts)


OPTIMIZERS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_optimizers_in_one_go(kind: type[torch.optim.Optimizer], how: str) -> None:
    def train(model: nn.Module, x: Tensor) -> None:
        optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1, **{how: True})
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        restored = kind(model.parameters(), lr=0.1, **{how: True})
        restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        restored.step()
        states.append([value.detach().cpu() for value in model.parameters()])

    states: list[list[Tensor]] = []
    assert_as_on_the_cpu(train, made(nn.Linear, 3, 2), numbers(4, 3))
    torch.testing.assert_close(states[0], states[1])


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling_skips_steps_that_overflow(fused: bool) -> None:
    def train(device: torch.device | str) -> tuple[Tensor, float]:
        model = made(nn.Linear, 3, 2).float().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=8.0, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            loss = model(numbers(4, 3, dtype=torch.float32, seed=step).to(device)).square().mean()
            scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return model.weight.detach().cpu(), scaler.get_scale()

    torch.testing.assert_close(train(DEVICE), train("cpu"))
