"""An optimizer that holds replaced parameters raises at its first step, and nothing keeps these parameters alive."""

import gc
import weakref

import pytest
import torch
from torch import nn

from dataparallel.replicas import replaced_parameters
from dataparallel.replicas.replaced_parameters import remember

pytestmark = pytest.mark.devices("cpu")  # it knows no slots: once is enough


@pytest.fixture
def old():
    """Two parameters that were replaced."""
    layer = nn.Linear(2, 1)
    remember([(name, old, old) for name, old in layer.named_parameters()], "Linear", "fully_shard")
    return layer.weight, layer.bias


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_a_step_with_one_raises_and_changes_nothing(old, make):
    other = nn.Parameter(torch.ones(2))
    # LBFGS takes one group.
    optimizer = make([other, old[1]], lr=0.1)
    other.grad = torch.ones(2)
    message = rf"^this {make.__name__} holds 'bias' of a Linear as it was before `fully_shard`.*after fully_shard"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            optimizer.step(lambda: other.sum())
    assert torch.equal(other, torch.ones(2))


def test_one_in_a_later_group_raises(old):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.add_param_group({"params": [old[0]]})
    with pytest.raises(RuntimeError, match="holds 'weight' of a Linear"):
        optimizer.step()


def test_nothing_is_kept_alive():
    gc.collect()
    before = len(replaced_parameters._replaced)
    layer = nn.Linear(2, 1)
    remember([(name, old, old) for name, old in layer.named_parameters()], "Linear", "fully_shard")
    assert len(replaced_parameters._replaced) == before + 2
    gone = weakref.ref(layer.weight)
    del layer
    assert gone() is None
    assert len(replaced_parameters._replaced) == before
