"""BatchNorm over the whole batch is the same with CUDA's kernels, in pieces, and with plain operators.

The kernels are a stand-in: they exist on CUDA only.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn

from batch_norms import SHAPES, Kernels, batch_of, made, same
from dataparallel import DataParallel, peers
from dataparallel.composable import replicate
from dataparallel.nn import SyncBatchNorm, sync_batch_norm

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(params=["in pieces", "by kernels"])
def way(request, monkeypatch):
    """Both ways on small chunks. Afterwards each pass has been made."""
    if request.param == "by kernels":
        kernels = Kernels().use(monkeypatch)
        yield request.param
        assert all(kernels.calls.values())
    else:
        monkeypatch.setattr(sync_batch_norm, "VALUES", 1)
        yield request.param


def results(model: nn.Module, module: nn.Module, batch: Tensor) -> list[Tensor]:
    """The output, all gradients, and the running statistics."""
    own = batch.clone().requires_grad_()
    output = model(own)
    (output.sin() * output.detach()).sum().backward()
    return [output, own.grad, *(parameter.grad for parameter in module.parameters()), *module.buffers()]


class TestParity:
    @pytest.mark.parametrize("kind", SHAPES)
    @pytest.mark.parametrize("affine", [True, False])
    def test_training(self, slots, way, kind, affine):
        module, batch = made(kind, affine=affine).to(slots[0]), batch_of(8, kind).to(slots[0])
        batch[:, 2] = 5  # a channel without variance
        alone = copy.deepcopy(module)
        wrapped = DataParallel(module, slots, sync_batch_norm=True)
        same(results(wrapped, module, batch), results(alone, alone, batch))

    def test_layouts(self, slots, way):
        """Chunks and gradients with other strides than each other."""
        module, batch = made(nn.BatchNorm2d).to(slots[0]), batch_of(8).to(slots[0])
        wanted = results(module, module, batch)
        for change in (
            lambda tensor: tensor.to(memory_format=torch.channels_last),
            lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3),
        ):
            for forward in (lambda x: wrapped(change(x)), lambda x: change(wrapped(x))):  # noqa: B023
                own = made(nn.BatchNorm2d).to(slots[0])
                wrapped = DataParallel(own, slots, sync_batch_norm=True)
                same(results(forward, own, batch), wanted)

    def test_a_gradient_without_memory_of_its_own(self, slots, way):
        """The gradient of a sum is one value, seen in all places."""
        found = []
        for sync in (False, True):
            module, batch = made(nn.BatchNorm1d).to(slots[0]), batch_of(8, nn.BatchNorm1d).to(slots[0]).requires_grad_()
            model = DataParallel(module, slots, sync_batch_norm=True) if sync else module
            model(batch).sum().backward()
            found.append([batch.grad, *(parameter.grad for parameter in module.parameters())])
        same(*found)

    def test_replicas_whose_output_leads_to_no_loss(self, slots, way):
        """Their chunks have a gradient all the same: the statistics are theirs too."""

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = SyncBatchNorm.convert(made(nn.BatchNorm2d))

            def forward(self, x: Tensor) -> Tensor:
                output = self.norm(x)
                return output.sin() if peers.index() == 0 else output.detach()

        module, batch = Net().to(slots[0]), batch_of(len(slots)).to(slots[0]).requires_grad_()
        DataParallel(module, slots)(batch).sum().backward()
        alone, other = made(nn.BatchNorm2d).to(slots[0]), batch.detach().clone().requires_grad_()
        alone(other)[:1].sin().sum().backward()
        same([batch.grad], [other.grad])


@pytest.mark.parametrize("steps", ["together", "one after the other"])
def test_a_penalty_on_gradients(slots, way, steps):
    """Gradients of the loss and of its gradients in one pass of backward, and in two."""
    found = []
    for sync in (False, True):
        module, batch = made(nn.BatchNorm2d).to(slots[0]), batch_of(7).to(slots[0]).requires_grad_()
        model = DataParallel(module, slots, sync_batch_norm=True) if sync else module
        loss = model(batch).sin().sum()
        (grad,) = torch.autograd.grad(loss, batch, create_graph=True)
        penalty = (grad - 1).square().sum()
        losses = [loss + penalty] if steps == "together" else [penalty, loss]
        for each in losses:
            each.backward(retain_graph=True)
        found.append([batch.grad, *(parameter.grad for parameter in module.parameters())])
    same(*found)


def test_the_stand_in_takes_what_the_kernels_take():
    kernels = Kernels()
    for name in ("stats", "elemt", "backward_reduce", "backward_elemt"):
        schema = getattr(torch.ops.aten, f"batch_norm_{name}").default._schema
        taken = inspect.signature(getattr(kernels, "reduce" if name == "backward_reduce" else name)).parameters
        assert [*taken] == [argument.name for argument in schema.arguments]


class TestPrecision:
    @pytest.mark.parametrize("dtype", HALF)
    def test_parameters_and_buffers_in_half_precision(self, slots, way, dtype):
        """As torch's BatchNorm has it where everything is in half precision."""
        module = made(nn.BatchNorm2d).to(slots[0], dtype)
        alone, batch = copy.deepcopy(module).float(), batch_of(8).to(slots[0], dtype)
        found = results(DataParallel(module, slots, sync_batch_norm=True), module, batch)
        wanted = results(alone, alone, batch.float())
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype in (dtype, torch.int64)
            torch.testing.assert_close(one.to(other.dtype), other, rtol=3e-2, atol=3e-2)


@pytest.mark.devices("sim")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 16, 64, 64), (2, 16, 128, 128), (4096, 128)], ids=str)
def test_memory_is_that_of_batch_norm(slots, dtype, shape):
    """Half a chunk more is allowed, for pieces; a tensor of the chunk's size is not."""
    rows = shape[0] * len(slots)
    batch = torch.randn(rows, *shape[1:], dtype=dtype).to(slots[0])

    def peaks(sync: bool) -> list[float]:
        module = nn.BatchNorm1d(shape[1]) if len(shape) == 2 else nn.BatchNorm2d(shape[1])
        model = nn.Sequential(nn.Identity(), module).to(slots[0])
        model = replicate(model, devices=slots, sync_batch_norm=sync)
        own, found = batch.clone().requires_grad_(), []
        for _ in range(2):
            found = []
            before = torch.sim.memory_allocated(slots[1])
            torch.sim.reset_peak_memory_stats(slots[1])
            output = model(own)
            found.append(torch.sim.max_memory_allocated(slots[1]) - before)
            torch.sim.reset_peak_memory_stats(slots[1])
            output.backward(batch)
            found.append(torch.sim.max_memory_allocated(slots[1]) - before)
            del output
            own.grad = None
        return [each / (batch.nbytes / len(slots)) for each in found]

    for found, limit in zip(peaks(True), peaks(False), strict=True):
        assert found <= limit + 0.51
