"""Blocks of ``docs/guide/machines.rst`` that need several machines do what the page says.

They run in two or four processes, each with slots of its own. ``test_example_machines`` runs the page's example.
"""

from functools import partial

import pytest
import torch
from torch import distributed, nn

from dataparallel.composable import fully_shard, replicate
from documents import DOCS, blocks_of
from machine_ranks import on_machines

pytestmark = pytest.mark.devices("cpu")  # their processes are their own: once is enough

PAGE = DOCS / "guide" / "machines.rst"


def block(word: str) -> str:
    """The block of the page that has this word."""
    (found,) = [block.text for block in blocks_of(PAGE) if block.skip and word in block.text]
    return found


@pytest.mark.parametrize(("hook", "bits"), [("fp16_compress_hook", 10), ("in_bfloat16", 7)])
def test_a_hook_sends_the_mean_with_less_precision(hook, bits):
    for found, expected in on_machines(step_with_hook, block(hook)):
        for gradient, mean in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, mean, rtol=2.0**-bits, atol=2.0**-bits * float(mean.abs().max()))
            assert not torch.equal(gradient, mean)


def test_a_hook_that_sends_matrices_of_low_rank():
    """It begins with plain sums, as its own settings say."""
    (found, expected), other = on_machines(step_with_hook, block("PowerSGDState"))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(other[0], found, rtol=0, atol=0)


@pytest.mark.long
def test_a_mesh_of_two_dimensions():
    for found, expected in on_machines(step_on_mesh, block("init_device_mesh"), ranks=4, slots=1):
        torch.testing.assert_close(found, expected)


class Blocks(nn.Module):
    """A model whose blocks are a list, as those of the page are."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.blocks:
            x = layer(x).tanh()
        return x


def parts(ranks: int) -> tuple[torch.Tensor, ...]:
    """The batch of each rank."""
    return torch.linspace(-1, 1, 48 * ranks).reshape(8 * ranks, 6).chunk(ranks)


def expected_gradients(ranks: int) -> list[torch.Tensor]:
    """Those of the mean over the batches of all ranks, on one device."""
    torch.manual_seed(0)
    model = Blocks()
    (sum(model(x).square().mean() for x in parts(ranks)) / ranks).backward()
    return [parameter.grad for parameter in model.parameters()]


def step_with_hook(rank, devices, code: str):
    """Gradients of a step with the hook that the code registers, and those that all ranks should have."""
    ranks = distributed.get_world_size()
    torch.manual_seed(rank)  # the values of rank 0 are sent to all
    model = replicate(Blocks(), devices=devices, process_group=distributed.group.WORLD)
    exec(code, {"torch": torch, "distributed": distributed, "model": model})
    model(parts(ranks)[rank]).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()], expected_gradients(ranks)


def step_on_mesh(rank, devices, code: str):
    """Gradients of a step with the model that the code has sharded, and those that all ranks should have."""
    ranks = distributed.get_world_size()
    torch.manual_seed(rank)  # the values of rank 0 are sent to all
    model = Blocks()
    exec(code, {"model": model, "fully_shard": partial(fully_shard, devices=devices)})
    model(parts(ranks)[rank]).square().mean().backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return gradients, expected_gradients(ranks)
