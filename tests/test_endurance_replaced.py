"""If parameters of a model are replaced while it trains, every byte that was kept for the old ones is freed."""

import weakref

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from memory import allocated

STEPS = 1_000
EVERY = 10

pytestmark = pytest.mark.devices("sim")


@pytest.fixture
def distinct():
    return [torch.device("sim", index) for index in range(8)]


def replace(model, name) -> nn.Parameter:
    """Puts another parameter there, with other values, and returns the former one."""
    path, _, key = name.rpartition(".")
    former = model.get_parameter(name)
    setattr(model.get_submodule(path), key, nn.Parameter(0.9 * former.detach() + 0.01))
    return former


def training_step(parallel, x, y) -> None:
    """Without an optimizer, which would hold the parameters that it was made for."""
    nn.functional.mse_loss(parallel(x), y).backward()
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter -= 0.01 * parameter.grad
    parallel.zero_grad()


def inference(parallel, x):
    with torch.no_grad():
        return parallel(x)


@pytest.mark.long
def test_a_thousand_steps_with_a_parameter_replaced_every_ten(distinct):
    """Every step is followed by a forward that records no graph, which has replicas of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).to(distinct[0])
    names = [name for name, _ in model.named_parameters()]
    x, y = torch.randn(16, 4, device=distinct[0]), torch.randn(16, 2, device=distinct[0])
    unused = allocated(distinct)
    parallel = DataParallel(model, distinct)
    training_step(parallel, x, y)
    inference(parallel, x)
    start = allocated(distinct)
    former = []
    for step in range(STEPS):
        if step % EVERY == 0:
            former.append(weakref.ref(replace(model, names[step // EVERY % len(names)])))
        training_step(parallel, x, y)
        inference(parallel, x)
    assert allocated(distinct) == start
    assert not any(parameter() for parameter in former)
    model.eval()
    torch.testing.assert_close(inference(parallel, x), inference(model, x))
    del parallel
    assert allocated(distinct) == unused
