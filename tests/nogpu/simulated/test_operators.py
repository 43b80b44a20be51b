"""Attention, optimizers and function transforms compute on a simulated device what they compute on the CPU.

`test_modules` has modules, `test_op_db` all operators.
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_chooses_the_dtype_by_operator(dtype: torch.dtype) -> None:
    x, image = torch.rand(4, 4, device=DEVICE), torch.rand(1, 4, 4, device=DEVICE)
    with torch.autocast("sim", dtype):
        low = [x @ x, F.linear(x, x), image.bmm(image), F.conv1d(image, image), F.scaled_dot_product_attention(x, x, x)]
        y = low[0]
        full = [y.softmax(1), y.exp(), F.mse_loss(y, x), F.layer_norm(y, (4,)), y.sum(), y.norm()]
        widest = [torch.cat([y, x]), torch.addcmul(y, x, x), torch.stack([y, x]), torch.dot(y[0], x[0])]
        assert torch.get_autocast_dtype("sim") == dtype
        with torch.autocast("sim", enabled=False):
            assert (x @ x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x, x)
    assert [value.dtype for value in low] == [dtype] * len(low)
    assert [value.dtype for value in (*full, *widest)] == [torch.float32] * (len(full) + len(widest))
    assert not torch.is_autocast_enabled("sim")


def test_function_transforms() -> None:
    def transformed(weight: Tensor, xs: Tensor) -> list[Tensor]:
        def loss(weight: Tensor, x: Tensor) -> Tensor:
            return (weight @ x).tanh().square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, xs)
        jacobian = torch.func.jacrev(lambda w: (w @ xs[0]).sin())(weight)
        forward = torch.func.jacfwd(lambda w: (w @ xs[0]).sin())(weight)
        value, tangent = torch.func.jvp(lambda x: x.exp().sum(), (xs[0],), (xs[1],))
        hessian = torch.func.hessian(lambda x: x.pow(3).sum())(xs[0])
        return [per_sample, jacobian, forward, value, tangent, hessian]

    assert_as_on_the_cpu(transformed, numbers(2, 3), numbers(4, 3))
