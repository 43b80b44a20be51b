"""Autocast, checkpoints, function transforms and tracing work on a simulated device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from like_the_cpu import DEVICE, assert_as_on_the_cpu, numbers

pytestmark = pytest.mark.devices("sim")


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
