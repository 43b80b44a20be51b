"""A call of a unit's module changes what its caller has as on one device, and its outputs are those of one node."""

import copy
import gc
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

from dataparallel.composable import fully_shard
from dataparallel.sharded.units.bindings import with_one_node
from each_form import whole


class Changing(nn.Module):
    """Changes its input in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "view of the input":
            x[:, :1].mul_(3)
        else:
            x.exp_()  # saves its result
        return x * self.weight


class Caller(nn.Module):
    """Uses what a layer has changed after the call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = Changing(kind)

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 2)[:, :3] if self.layer.kind == "view" else x[:, :3] * 2
        return self.layer(x) + x.square()


@pytest.mark.parametrize("kind", ["tensor", "view", "view of the input"])
def test_a_change_in_place_reaches_the_tensor_of_the_caller(kind, slots, root):
    twin, model = Caller(kind).to(root), Caller(kind).to(root)
    for module in (model.layer, model):
        fully_shard(module, devices=slots)
    found = []
    for net in (model, twin):
        x = torch.linspace(0, 1, 24, device=root).view(6, 4).requires_grad_()
        output = net(x)
        output.sum().backward()
        found.append([output.detach(), x.grad])
    torch.testing.assert_close(*found)
    torch.testing.assert_close(model.layer.weight.grad.full_tensor(), twin.layer.weight.grad)


def test_a_reshard_inside_a_backward_leaves_the_parameters_to_it(slots, root):
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(root)
    model, found = fully_shard(copy.deepcopy(twin), devices=slots), []
    held = [[model]]  # deeper than where references become those of a replica
    for net in (twin, model):
        x = torch.ones(6, 3, device=root, requires_grad=True)
        if net is model:  # the first layer's weight is still needed
            hook = lambda module, args, output: output.register_hook(lambda grad: held[0][0].reshard()) and None  # noqa: E731
            net[1].register_forward_hook(hook)
        net(x).square().sum().backward()
        found.append([x.grad, *(whole(parameter.grad) for parameter in net.parameters())])
    torch.testing.assert_close(*found)


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
