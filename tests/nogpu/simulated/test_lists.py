"""Operators over lists of tensors on simulated devices: one launch where a device has a fused kernel for it."""

import pytest
import torch

from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO
from like_the_cpu import launches_of

pytestmark = pytest.mark.devices("sim")


def many(count=1_000, device=ONE):
    return [torch.ones(3, device=device) for _ in range(count)]


@pytest.mark.parametrize(
    "operator",
    [
        torch.cat,
        lambda tensors: torch.cat(tensors, out=torch.empty(3_000, device=ONE)),
        lambda tensors: torch._foreach_add(tensors, tensors),
        lambda tensors: torch._foreach_copy_(tensors, tensors[::-1]),
        lambda tensors: torch._foreach_mul_(tensors, torch.tensor(2.0)),
        lambda tensors: torch._foreach_norm(tensors),
    ],
)
def test_a_thousand_tensors_in_one_operator_are_one_launch(operator):
    assert launches_of(operator, many()) == {1: 1}


def test_a_thousand_parts_of_one_tensor_are_copied_in_one_launch():
    flat, parts = torch.arange(3_000.0, device=ONE), many()
    assert launches_of(lambda: torch.split_with_sizes_copy(flat, [3] * 1_000, out=parts)) == {1: 1}
    assert parts[999].tolist() == [2997, 2998, 2999]


def test_lists_that_lie_on_several_devices_are_launched_one_by_one():
    assert launches_of(torch._foreach_add_, many(2) + many(3, TWO), 1) == {1: 2, 2: 3}
    targets, sources = many(3, TWO), many(3)
    with torch.sim.counted() as counts:
        torch._foreach_copy_(targets, sources)
    assert (counts.launches[1], counts.launches[2]) == (3, 0)
    assert counts.copied == {(1, 2): 36}
