"""A unit's parameters on a slot are outputs of one node, and so are the outputs of a unit's call."""

import gc
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

from dataparallel.sharded.units.nodes import make_outputs, with_one_node


class Receiver:
    """Keeps what a node hands on."""

    def __init__(self) -> None:
        self.received: list[list[Tensor | None]] = []

    def receive(self, grads: list[Tensor | None]) -> None:
        self.received.append([*grads])


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def tensors(receiver: Receiver, root: torch.device) -> list[Tensor]:
    made = [torch.full((2,), float(i), device=root) for i in range(3)]
    make_outputs(made, root, receiver.receive)
    return made


def as_numbers(grads: list[Tensor | None]) -> list[list[float] | None]:
    return [None if grad is None else grad.tolist() for grad in grads]


def test_gradients_arrive_together_and_missing_ones_are_none(tensors, receiver):
    (tensors[0] * 3 + tensors[2] * 5).sum().backward()
    assert [as_numbers(grads) for grads in receiver.received] == [[[3, 3], None, [5, 5]]]


def test_gradients_are_received_before_the_rest_of_the_backward(tensors, receiver, root):
    """So the unit is summed and freed while earlier layers compute."""
    seen: list[int] = []
    first = nn.Linear(2, 2, device=root)
    x = first(torch.ones(2, device=root))
    x.grad_fn.register_prehook(lambda grads: seen.append(len(receiver.received)))
    (x * tensors[1]).sum().backward()
    assert seen == [1]


def test_a_graph_that_outlives_its_module_says_so(root):
    receiver = Receiver()
    tensor = torch.ones(2, device=root)
    make_outputs([tensor], root, receiver.receive)
    loss = (tensor * 2).sum()
    del receiver
    gc.collect()
    with pytest.raises(RuntimeError, match=r"parameters that this graph uses are gone.*Call backward\(\) before"):
        loss.backward()


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


@pytest.mark.devices("cpu")
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

    @pytest.mark.parametrize("make", [lambda x: x.view(2, 2), lambda x: x.diag().to_sparse()], ids=["view", "sparse"])
    def test_views_of_what_was_given_and_sparse_ones_are_left_alone(self, make, x):
        given = x * 1
        output = (make(given), *two(x))
        assert with_one_node(output, given)[0] is output[0]


@pytest.mark.devices("cpu")
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

    def test_of_one_output_only(self, x):
        y = torch.ones(4, dtype=torch.float64, requires_grad=True)
        a, _ = with_one_node((x.square(), y.sin()), x)
        of_x, of_y = grad(a.sum(), [x, y], allow_unused=True)
        assert of_x is not None
        assert of_y is None


@pytest.mark.devices("cpu")
def test_the_node_of_outputs_keeps_nothing(x):
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
