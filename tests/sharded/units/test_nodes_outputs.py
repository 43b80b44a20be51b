"""The outputs of a unit's call are outputs of one node, which changes no value and no gradient and keeps nothing."""

import gc
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradgradcheck

from dataparallel.sharded.units.nodes import with_one_node


@pytest.fixture
def x() -> Tensor:
    return torch.arange(1.0, 5.0, dtype=torch.float64).requires_grad_()


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.square(), x.sin()


Pair = namedtuple("Pair", "first second")


@dataclass
class Both:
    first: Any
    second: Any


class TestStructures:
    @pytest.mark.parametrize("make", [Pair, Both, lambda *of: [*of], lambda a, b: {"a": a, "b": {"c": (b,)}}])
    def test_keep_their_types_and_values(self, make, x):
        output = make(*two(x))
        found = with_one_node(output, x)
        assert type(found) is type(output)
        assert str(found).replace("OneNodeBackward", "") != str(output)
        flat = torch.utils._pytree.tree_leaves(found if not isinstance(found, Both) else [found.first, found.second])
        assert len({tensor.grad_fn for tensor in flat}) == 1
        for tensor, expected in zip(flat, two(x), strict=True):
            torch.testing.assert_close(tensor, expected)

    def test_what_has_no_graph_is_the_same_object(self, x):
        labels, text, constant = torch.tensor([1, 2]), "text", torch.ones(2)
        found = with_one_node([*two(x), labels, text, constant, None], x)
        assert found[2] is labels
        assert found[3] is text
        assert found[4] is constant
        assert not found[4].requires_grad

    def test_a_tensor_that_is_there_twice_stays_one(self, x):
        a, b = two(x)
        found = with_one_node([a, b, a], x)
        assert found[0] is found[2]

    @pytest.mark.parametrize("make", [lambda x: x.square(), lambda x: [x.square(), 3], lambda x: x.square().chunk(2)])
    def test_of_one_node_are_left_alone(self, make, x):
        output = make(x)
        assert with_one_node(output, x) is output

    def test_without_gradients_are_left_alone(self, x):
        with torch.no_grad():
            output = two(x)
        assert with_one_node(output, x) is output

    def test_that_were_given_are_left_alone(self, x):
        """The call has written to them, and its caller may go on doing so."""
        given = [*two(x)]
        output = (*two(x), given, given[0])
        found = with_one_node(output, (x, given))
        assert found[2] is given
        assert found[3] is given[0]
        assert found[0] is not output[0]

    def test_that_share_memory_are_left_alone(self, x):
        """A change of one of them in place is part of the other's graph."""
        base = x.square()
        output = (base, base[:2], *two(x))
        a, view, *_ = found = with_one_node(output, x)
        assert a is base
        assert view is output[1]
        assert found[2] is not output[2]
        view.mul_(3)
        torch.testing.assert_close(grad(a.sum(), x)[0], 2 * x.detach() * torch.tensor([3, 3, 1, 1]))

    def test_that_are_views_of_what_was_given_are_left_alone(self, x):
        given = x * 1
        output = (given.view(2, 2), *two(x))
        assert with_one_node(output, given)[0] is output[0]

    def test_sparse_ones_are_left_alone(self, x):
        output = (x.diag().to_sparse(), *two(x))
        assert with_one_node(output, x)[0] is output[0]


class TestGradients:
    def test_begin_when_all_are_there(self, x):
        """The second output's is ready long before the first one's."""
        seen = []
        a, b = two(x)
        for name, tensor in ("a", a), ("b", b):
            tensor.register_hook(lambda grad, name=name: seen.append(name))
        a, b = with_one_node((a, b), x)
        late = a * 1
        late.grad_fn._set_sequence_nr(0)  # after all others that are ready
        late.register_hook(lambda grad: seen.append("late"))
        (late.sum() + b.sum()).backward()
        assert seen[0] == "late"
        assert {*seen[1:]} == {"a", "b"}

    def test_are_those_without_the_node(self, x):
        a, b = with_one_node(two(x), x)
        torch.testing.assert_close(grad((a * b).sum(), x), grad(torch.mul(*two(x)).sum(), x))

    def test_are_none_where_they_are_undefined(self, x):
        y = torch.ones(4, dtype=torch.float64, requires_grad=True)
        a, _ = with_one_node((x.square(), y.sin()), x)
        a.sum().backward()
        assert x.grad is not None
        assert y.grad is None

    def test_of_one_output_only(self, x):
        y = torch.ones(4, dtype=torch.float64, requires_grad=True)
        a, _ = with_one_node((x.square(), y.sin()), x)
        of_x, of_y = grad(a.sum(), [x, y], allow_unused=True)
        assert of_x is not None
        assert of_y is None

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_of_one_backward_after_the_other(self, order, x):
        outputs = with_one_node(two(x), x)
        for at in order:
            outputs[at].sum().backward(retain_graph=True)
        torch.testing.assert_close(x.grad, 2 * x.detach() + x.detach().cos())

    def test_can_be_differentiated_again(self, x):
        assert gradgradcheck(lambda x: torch.mul(*with_one_node(two(x), x)), (x,))

    def test_after_a_change_in_place(self, x):
        a, b = with_one_node((x * 2, x * 3), x)
        a.mul_(b.detach())
        torch.testing.assert_close(grad(a.sum(), x)[0], 6 * x.detach())

    def test_a_change_of_what_backward_needs_raises(self, x):
        a, b = with_one_node((x.exp(), x.sin()), x)
        a.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (a + b).sum().backward()


def test_the_node_keeps_nothing(x):
    outputs = with_one_node(two(x), x)
    node = outputs[0].grad_fn
    tensors = [weakref.ref(tensor) for tensor in outputs]
    gc.disable()
    try:
        del outputs
        assert not any(tensor() for tensor in tensors)
        of_node = weakref.ref(node)
        del node
        assert of_node() is None
    finally:
        gc.enable()
