"""Autocast, checkpoints, function transforms and tracing work on a simulated device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from like_the_cpu import DEVICE, assert_as_on_the_cpu, made, numbers

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_under_autocast_are_in_the_parameters_dtype(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(DEVICE)
    with torch.autocast("sim", dtype):
        loss = F.cross_entropy(model(torch.rand(3, 4, device=DEVICE)), torch.tensor([0, 1, 1], device=DEVICE))
    loss.backward()
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


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


def test_vmap_over_random_numbers_and_modules() -> None:
    models = [made(nn.Linear, 3, 2).to(DEVICE) for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = numbers(4, 3).to(DEVICE)
    outputs = torch.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    # vmap uses other kernels, so the last bit may differ.
    torch.testing.assert_close(outputs[1].detach(), models[1](x).detach(), rtol=0, atol=1e-12)
    drawn = torch.vmap(lambda x: x + torch.randn(3, dtype=x.dtype, device=DEVICE), randomness="different")(x)
    assert (drawn.device, drawn.shape) == (DEVICE, (4, 3))


@pytest.mark.filterwarnings("ignore")
def test_compiled_modules_with_the_backend_aot_eager() -> None:
    torch._dynamo.reset()
    model = made(nn.Sequential, nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))

    def run(model: nn.Module, x: Tensor) -> Tensor:
        return torch.compile(model, backend="aot_eager", fullgraph=True)(x)

    assert_as_on_the_cpu(run, model, numbers(4, 3).requires_grad_())


def test_fake_tensors_have_the_device() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3, 4, device=DEVICE)
        assert (fake @ fake.t()).device == DEVICE


def test_gradients_are_those_of_finite_differences() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.tanh() @ y.cumsum(0)).logsumexp(1) / (1 + x.square().sum())

    inputs = [numbers(3, 3, seed=seed).to(DEVICE).requires_grad_() for seed in range(2)]
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_saved_tensors_move_to_the_host() -> None:
    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return (x.exp() * x).sin()

    assert_as_on_the_cpu(run, numbers(3).requires_grad_())


def test_a_default_device() -> None:
    with torch.device(DEVICE):
        assert torch.ones(2).device == nn.Linear(2, 2).weight.device == torch.arange(3).device == DEVICE
        assert torch.tensor([1.0, 2.0]).device == torch.linspace(0, 1, 3).device == torch.eye(2).device == DEVICE
