"""A call of a unit's module changes what its caller has as on one device, also after a call of another tree."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from memory import allocated


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
    model = fully_shard(copy.deepcopy(twin), devices=slots)
    for net in (model, twin):
        output = net(torch.ones(6, 3, device=root))
        if net is model:
            output.register_hook(lambda grad: model.reshard())
        output.square().sum().backward()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)


class Either(nn.Module):
    """Two layers in one unit, of which a call uses the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


@pytest.mark.devices("sim")
def test_a_unit_of_which_some_modules_were_not_called_is_freed_with_the_call(slots, root):
    model = Either().to(root)
    fully_shard([*model.layers], devices=slots)
    fully_shard(model, devices=slots)
    x = torch.ones(len(slots), 256, device=root)
    with torch.no_grad():
        model(x)
    before = allocated(slots)
    output = model(x)
    held = [now - then for now, then in zip(allocated(slots), before, strict=True)]
    assert max(held) < 256 * 256 * 4, "a layer's weight"
    del output
