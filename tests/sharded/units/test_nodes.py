"""A unit's parameters on a slot are outputs of one node, which hands on all gradients at once and stays."""

import gc

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded.units.nodes import make_outputs


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


def test_the_tensors_stay_the_same_objects_and_need_gradients(tensors):
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [1, 1], [2, 2]]
    assert len({tensor.grad_fn for tensor in tensors}) == 1
    assert not any(tensor.is_leaf for tensor in tensors)


def test_gradients_arrive_together_and_missing_ones_are_none(tensors, receiver):
    (tensors[0] * 3 + tensors[2] * 5).sum().backward()
    assert [as_numbers(grads) for grads in receiver.received] == [[[3, 3], None, [5, 5]]]


def test_the_node_serves_each_graph(tensors, receiver):
    losses = [(tensors[1] * factor).sum() for factor in (2, 3, 4)]
    for loss in reversed(losses):
        loss.backward()
    assert [as_numbers(grads)[1] for grads in receiver.received] == [[4, 4], [3, 3], [2, 2]]


def test_uses_in_one_graph_are_added_before(tensors, receiver):
    (tensors[1] * 2 + tensors[1] * 3).sum().backward()
    assert [as_numbers(grads) for grads in receiver.received] == [[None, [5, 5], None]]


def test_gradients_are_received_before_the_rest_of_the_backward(tensors, receiver, root):
    """So the unit is summed and freed while earlier layers compute."""
    seen: list[int] = []
    first = nn.Linear(2, 2, device=root)
    x = first(torch.ones(2, device=root))
    x.grad_fn.register_prehook(lambda grads: seen.append(len(receiver.received)))
    (x * tensors[1]).sum().backward()
    assert seen == [1]


def test_the_node_is_recorded_whatever_mode_is_on(receiver, root):
    with torch.no_grad():
        made = [torch.ones(2, device=root)]
        make_outputs(made, root, receiver.receive)
    (made[0] * 2).sum().backward()
    assert [as_numbers(grads) for grads in receiver.received] == [[[2, 2]]]


def test_a_graph_that_outlives_its_module_says_so(root):
    receiver = Receiver()
    tensor = torch.ones(2, device=root)
    make_outputs([tensor], root, receiver.receive)
    loss = (tensor * 2).sum()
    del receiver
    gc.collect()
    with pytest.raises(RuntimeError, match="the module whose parameters this graph uses is gone"):
        loss.backward()
