"""`Collect` brings tensors of several devices to one, and one node of the graph sends all gradients back."""

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from dataparallel.autograd.functions import Collect


def tensors(slots: list) -> list[Tensor]:
    return [
        torch.randn(slot + 1, 2, dtype=torch.float64, device=device, requires_grad=True)
        for slot, device in enumerate(slots)
    ]


def test_it_is_twice_differentiable(slots: list, root: torch.device) -> None:
    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(found**2 for found in Collect.apply([root], *inputs))

    assert gradcheck(function, tensors(slots))
    assert gradgradcheck(function, tensors(slots))


def test_all_have_one_node(slots: list, root: torch.device) -> None:
    found = Collect.apply([root], *tensors(slots))
    assert {each.device for each in found} == {root}
    assert len({each.grad_fn for each in found}) == 1


def test_what_gets_no_gradient_has_none(slots: list, root: torch.device) -> None:
    sources = tensors(slots)
    found = Collect.apply([root], *sources, torch.arange(3, device=root))
    assert not found[-1].requires_grad
    found[1].sum().backward()
    assert [source.grad is None for source in sources] == [True, False, True]
    assert sources[1].grad.device == sources[1].device


def test_each_may_be_changed_in_place(slots: list, root: torch.device) -> None:
    sources = tensors(slots)
    first, second, _ = Collect.apply([root], *(source * 1 for source in sources))
    square = first**2
    second.mul_(3)
    (square.sum() + second.sum()).backward()
    torch.testing.assert_close(sources[0].grad, 2 * sources[0].detach())
    assert sources[1].grad.unique().tolist() == [3]
