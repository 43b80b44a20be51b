"""A call of a unit's module changes what its caller has as on one device, also after a call of another tree."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard
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


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.slots(4)
def test_a_unit_may_have_been_called_by_another_tree_since(slots):
    """The gradients of each backward go to the tree whose graph it is, as on one device."""
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 5)).to(slots[0])
    x = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(1)).to(slots[0])
    model = copy.deepcopy(single)
    for module in (model[1], model):
        fully_shard(module, devices=slots)
    for _ in range(2):
        whole, part = model(x[0]).square().mean(), model[1](x[1]).square().mean()
        whole.backward()
        part.backward()
        (single(x[0]).square().mean() + single[1](x[1]).square().mean()).backward()
    for found, expected in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)


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
