"""Operators that take functions, as ``torch.cond`` does: torch traces these in each call and in each backward."""

import sys

import pytest
import torch
from torch import nn

from around import assert_trains_alike


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        y = self.first(x)
        y = torch.cond(self.first.bias.sum() > 0, lambda y: y * 2, lambda y: y.sin(), (y,))
        return self.second(y)


def build(root):
    torch.manual_seed(0)
    return Branches().double().to(root)


@pytest.fixture
def threads_that_switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.few(1)
@pytest.mark.slots(3, long=[2])
def test_replicas_trace_one_at_a_time(form, slots, root, threads_that_switch_often):
    assert_trains_alike(form(build(root), slots), build(root), root)
