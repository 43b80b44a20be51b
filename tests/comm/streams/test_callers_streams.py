"""A step on the caller's own streams gives the same results as on the default ones, without a race.

Clocks show a missing order whatever the timing; GPUs only show wrong numbers, now and then.
"""

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from steps import Cubes, build, numbers

pytestmark = pytest.mark.devices("sim", "cuda")


@pytest.mark.slots(1, 2, 3, 8)
@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("form", ["DataParallel", "replicate"])
def test_training_on_batches_in_host_memory_on_the_callers_streams(
    form: str, pin_memory: bool, slots: list, root: torch.device, side_streams: dict
) -> None:
    model, twin = build(root), build(root)
    parallel = DataParallel(model, slots) if form == "DataParallel" else replicate(model, devices=slots)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
    x = numbers(torch.device("cpu")).detach()
    memory = x.pin_memory() if pin_memory else x.clone()
    for k in range(5):
        for call, optimizer in ((parallel, optimizers[0]), (twin, optimizers[1])):
            optimizer.zero_grad()
            memory.copy_(x).add_(k)
            output = call(memory if call is parallel else memory.to(root))
            memory.fill_(-1)
            output.square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def penalty_of_gradients(model: nn.Module, x: Tensor, to: list[Tensor]) -> list[Tensor]:
    """Third derivatives: gradients of the norm of the gradients of the norm of gradients with respect to ``to``."""
    first = torch.autograd.grad(model(x).square().mean(), to, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().mean() for grad in first), to, create_graph=True)
    return list(torch.autograd.grad(sum(grad.square().mean() for grad in second), to))


@pytest.mark.slots(2, 3, 8)
@pytest.mark.parametrize("way", ["star", "chain"], indirect=True)
@pytest.mark.parametrize("what", ["input", "weight", "both"])
def test_a_gradient_penalty_on_the_callers_streams(
    what: str, way: str, slots: list, root: torch.device, side_streams: dict
) -> None:
    """The passes that are recorded run in the engine's threads, the nodes that they make on the caller's streams."""
    model, x = Cubes().to(root), numbers(root)
    to = {"input": [x], "weight": [model.weight], "both": [x, model.weight]}[what]
    expected = penalty_of_gradients(model, x, to)
    found = penalty_of_gradients(DataParallel(model, slots), x, to)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
