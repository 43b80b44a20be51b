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


@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def test_packed_sequences_of_lengths_on_the_cpu(kind: type[nn.Module], is_sorted: bool) -> None:
    lengths = torch.tensor([5, 3, 1] if is_sorted else [3, 5, 1])

    def padded(layer: nn.Module, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=is_sorted)
        output, lengths_after = nn.utils.rnn.pad_packed_sequence(layer(packed)[0])
        assert lengths_after.tolist() == lengths.tolist()
        return output

    assert_as_on_the_cpu(padded, made(kind, 3, 4, bidirectional=True), numbers(5, 3, 3).requires_grad_())


CONVOLUTIONS = {
    "1d": (1, nn.Conv1d, {}),
    "2d-strided": (2, nn.Conv2d, {"stride": 2, "padding": 1}),
    "2d-grouped": (2, nn.Conv2d, {"groups": 2, "bias": False}),
    "3d-transposed": (3, nn.ConvTranspose3d, {"bias": False}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_have_second_derivatives(name: str) -> None:
    dims, kind, options = CONVOLUTIONS[name]
    layer = made(kind, 2, 2, 2, **options).to(DEVICE)
    x = numbers(1, 2, *(3,) * dims).to(DEVICE).requires_grad_()
    parameters = {name: value.detach() for name, value in layer.named_parameters()}

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters | {"weight": weight}, (x,))

    weight = parameters["weight"].clone().requires_grad_()
    assert torch.autograd.gradcheck(call, (x, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (x, weight), fast_mode=True)


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


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_transformer_encoder_also_on_its_fast_path(training: bool, padded: bool) -> None:
    layer = made(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True)
    encoder = made(nn.TransformerEncoder, layer, 2).train(training)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def encode(encoder: nn.Module, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(training):
            return encoder(x, src_key_padding_mask=padding.to(x.device) if padded else None)

    assert_as_on_the_cpu(encode, encoder, numbers(2, 5, 8))


def test_nested_tensors() -> None:
    parts = [numbers(2, 3), numbers(4, 3)]

    def padded(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        nested = torch.nested.nested_tensor([first, second], device=first.device)
        assert nested.device == first.device
        return torch.nested.to_padded_tensor(nested * 2, 0.0), *nested.relu().unbind()

    assert_as_on_the_cpu(padded, *parts)


def test_foreach_functions() -> None:
    xs = [numbers(3, seed=0), numbers(2, 2, seed=1), numbers(0, seed=2)]

    def foreach(*xs: Tensor) -> list[Tensor]:
        ys = [x.clone() for x in xs]
        torch._foreach_add_(ys, xs, alpha=2)
        torch._foreach_mul_(ys, [1.0, 2.0, 3.0])
        torch._foreach_addcdiv_(ys, xs, [x.exp() for x in xs], value=0.5)
        torch._foreach_lerp_(ys, xs, 0.1)
        torch._foreach_copy_(list(xs), ys)
        return [*xs, *torch._foreach_norm(ys), *torch._foreach_sqrt([y.abs() for y in ys]), *torch._foreach_max(ys[:2])]

    assert_as_on_the_cpu(foreach, *xs)


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
