"""Exported programs and traced graphs as sources. A graph is refused if a constant of it is wrong on some slot."""

import functools

import pytest
import torch
from torch import nn

from around import assert_trains_alike, batches
from dataparallel.testing.parity import Perturbation, assert_same_step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Net(nn.Module):
    def __init__(self, adds):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("shift", torch.ones(4))
        self.adds = adds

    def forward(self, x):
        return self.second(self.adds(self, self.first(x).tanh() + self.shift))


def nothing(net, y):
    return y


def a_tensor_of_numbers(net, y):
    return y * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=y.dtype, device=y.device)


def a_number_on_the_cpu(net, y):
    return y * torch.tensor(3.0, dtype=torch.float64)


def a_plain_tensor(net, y):
    return y * net.factor


def a_branch(net, y):
    return torch.cond(
        y.sum() > 0,
        lambda y: y * torch.ones(4, dtype=y.dtype, device=y.device),
        lambda y: y.sin() + torch.arange(4, dtype=y.dtype, device=y.device),
        (y,),
    )


ANYWHERE = [nothing, a_number_on_the_cpu]
BOUND = [a_tensor_of_numbers, a_plain_tensor, a_branch]
"""Their graphs name a device, or hold a tensor there."""


def build(adds, root):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net(adds).double().to(root)
    net.factor = torch.arange(4, dtype=torch.float64, device=root)
    return net


def exported(adds, root, strict=False):
    """The module of an exported program whose batch may have any size."""
    net, (x,) = build(adds, root), batches(root, [6])
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=strict)
    return program.module()


@pytest.mark.parametrize("adds", ANYWHERE, ids=lambda kind: kind.__name__)
@pytest.mark.slots(3, long=[2])
def test_training_equals_one_device(adds, form, slots, root):
    assert_trains_alike(form(exported(adds, root), slots), exported(adds, root), root)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("adds", BOUND, ids=lambda kind: kind.__name__)
def test_on_cpu_slots_constants_are_shared(adds, form, slots, root):
    assert_trains_alike(form(exported(adds, root), slots), exported(adds, root), root)


@pytest.mark.devices("sim", "cuda")
@pytest.mark.apart(2)
@pytest.mark.parametrize("adds", BOUND, ids=lambda kind: kind.__name__)
def test_constants_on_a_device_are_refused_by_name(adds, form, slots, root):
    model = nn.Sequential(exported(adds, root), nn.Tanh())
    (x,) = batches(root, [6])
    with pytest.raises(
        RuntimeError, match=rf"graph '0.*' to .*:1: .* on {root} is a constant of its code.*Wrap the module"
    ):
        form(model, slots)(x)


def test_each_replica_has_its_own_parameters(slots, root):
    assert_same_step(
        functools.partial(exported, nothing, root),
        ((next(batches(root, [7])),), {}),
        slots,
        perturbation=Perturbation(),
    )


def test_a_program_of_a_wrapper_is_refused(form, slots, root):
    model, (x,) = form(build(nothing, root), slots), batches(root, [6])
    with pytest.raises((RuntimeError, TypeError), match=r"torch\.export is running around|sharded tensors"):
        torch.export.export(model, (x,), strict=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"dataparallel sends tensors|sharded tensors"):
        torch.export.export(model, (x,), strict=True)
