"""The FLOPs of launches are those that torch's counter finds in the same code."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from like_the_cpu import DEVICE as ONE
from nogpu.timeline import recording
from processes import run_script

pytestmark = pytest.mark.devices("sim")


def ones(*shape):
    return torch.ones(*shape, device=ONE, requires_grad=True)


def recorded(function):
    with torch.sim.timeline() as timeline:
        function()
    return sum(launch.flops for launch in timeline.recording.launches)


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def back(result):
    result.sum().backward()


@pytest.mark.parametrize(
    "function",
    [
        lambda: back(torch.mm(ones(3, 4), ones(4, 5))),
        lambda: back(torch.bmm(ones(2, 3, 4), ones(2, 4, 5))),
        lambda: back(F.linear(ones(2, 3, 4), ones(5, 4), ones(5))),
        lambda: back(F.conv1d(ones(2, 3, 9), ones(6, 3, 3), ones(6), padding=1)),
        lambda: back(F.conv2d(ones(2, 4, 9, 8), ones(6, 2, 3, 3), ones(6), stride=2, groups=2)),
        lambda: back(F.conv2d(ones(2, 4, 9, 8).detach(), ones(6, 4, 3, 3))),
        lambda: back(F.conv_transpose2d(ones(2, 4, 5, 5), ones(4, 3, 3, 3), stride=2)),
        lambda: back(F.conv3d(ones(1, 2, 5, 5, 5), ones(3, 2, 2, 2, 2), dilation=2)),
        lambda: torch.mm(ones(3, 4).detach(), ones(4, 5).detach(), out=torch.empty(3, 5, device=ONE)),
        lambda: ones(3).exp().sum().backward(),
    ],
)
def test_products_and_convolutions(function):
    """Forward and backward."""
    assert recorded(function) == counted(function)


@pytest.mark.parametrize("shape", [(2, 4, 6, 8), (1, 2, 16, 8)])
def test_attention_on_the_cpu_counts_as_on_cuda(shape):
    """`FlopCounterMode` has no formula for the CPU's operator; the products that it stands for are these."""

    def attention():
        back(F.scaled_dot_product_attention(*(ones(*shape) for _ in range(3))))

    batch, heads, length, width = shape
    product = 2 * batch * heads * length * length * width
    with torch.sim.timeline() as timeline:
        attention()
    found = {launch.op: launch.flops for launch in timeline.recording.launches if launch.flops}
    assert sum(found.values()) == 7 * product  # two forward, five backward: it computes the scores again
    assert len(found) == 2


def test_a_formula_that_fails_says_for_which_operator():
    def formula(*_, **__):
        raise KeyError("what it needs")

    with pytest.raises(RuntimeError, match=r"FLOPs of aten::mm .* \[\(3, 4\), \(4, 5\)\].*what it needs"):
        recording.operations("aten::mm", formula, ([(3, 4), (4, 5)], {}, [(3, 5)]))


@pytest.mark.devices("cpu")
def test_the_formulas_are_imported_when_they_are_needed():
    """They import Triton where it is installed, and Triton brings a free-threaded Python its lock back."""
    run_script("import nogpu.simulated, sys; assert 'torch.utils.flop_counter' not in sys.modules")
