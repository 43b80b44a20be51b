"""A node that hands gradients over to the stream on which it was made."""

import pytest
import torch
from torch import Tensor

from dataparallel.functions import current_streams
from dataparallel.hand_over import HandOver
from dataparallel.side_streams import BesideBackward, side_stream

pytestmark = pytest.mark.devices("sim", "cuda")


def test_what_is_handed_over_belongs_to_the_side_stream(slots: list, root: torch.device) -> None:
    x = torch.ones(3, device=root, requires_grad=True)
    seen = []
    with side_stream(root):
        (view,) = HandOver.apply(x)
    assert view.data_ptr() == x.data_ptr()
    view.grad_fn.register_prehook(lambda _: seen.append(torch.accelerator.current_stream(root)))
    (view * 2).sum().backward()
    assert seen == [side_stream(root)]
    assert x.grad.tolist() == [2, 2, 2]


def test_an_envelope_has_the_shape_of_what_is_in_it_and_no_memory(root: torch.device) -> None:
    seen: list[Tensor] = []

    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, y: Tensor, beside: BesideBackward) -> Tensor:
            ctx.beside = beside
            return x.sum() + y.sum()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> tuple:
            sums = [torch.full((3, 2), 5.0, device=root), torch.full((), 7.0, dtype=torch.float64, device=root)]
            seen.extend(HandOver.enveloped(sums, ctx.beside))
            return (*seen, None)

    beside = BesideBackward(current_streams([root]))
    x = torch.ones(3, 2, device=root, requires_grad=True)
    y = torch.ones((), dtype=torch.float64, device=root, requires_grad=True)
    with side_stream(root):
        views = HandOver.apply(x, y)
    Sums.apply(*views, beside).backward()
    assert x.grad.tolist() == [[5, 5]] * 3
    assert y.grad.item() == 7
    assert [(each.shape, each.dtype) for each in seen] == [(x.shape, x.dtype), (y.shape, y.dtype)]
    assert all(each.untyped_storage().nbytes() <= 8 for each in seen)
    assert beside._passes == {}
