"""``torch.func.functional_call``: replicas compute with the values that are given by name, and gradients reach them."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from around import assert_trains_alike, batches, inner
from dataparallel.composable import fully_shard
from dataparallel.sharded import Shard, distribute_tensor
from each_form import FORMS, by_wrapper, replicated, whole

WAYS = {"DataParallel": (by_wrapper, "held.module."), "replicate": (replicated, "held.")}


class Holder(nn.Module):
    """``functional_call`` takes no ``torch.nn.DataParallel`` itself. It takes a module that holds one."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, *args, **kwargs):
        return self.held(*args, **kwargs)


def build(root):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(inner(), nn.BatchNorm1d(3)).double().to(root)


def leaves_for(module, seed=7):
    """For each parameter other values, from which those that are given are computed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        .to(parameter.device)
        .requires_grad_()
        for name, parameter in module.named_parameters()
    }


def given(leaves, prefix=""):
    return {prefix + name: leaf.sin() * 2 for name, leaf in leaves.items()}


def gradients(leaves):
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.fixture
def reference(root):
    return build(root).eval()


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.fixture
def model(way, slots, root):
    return Holder(way[0](build(root).eval(), slots))


@pytest.fixture
def x(root):
    return next(batches(root, [7]))


@pytest.mark.slots(2, 3)
def test_gradients_reach_what_was_given_and_nothing_else(model, reference, way, x):
    for seed in range(3):
        ours, theirs = leaves_for(reference, seed), leaves_for(reference, seed)
        output = functional_call(model, given(ours, way[1]), (x,))
        expected = functional_call(reference, given(theirs), (x,))
        torch.testing.assert_close(output, expected, atol=1e-9, rtol=0)
        output.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(gradients(ours), gradients(theirs), atol=1e-9, rtol=0)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_buffers_that_are_given_get_the_statistics(model, reference, way, root):
    """In training BatchNorm normalises each chunk by itself, so a twin runs the first chunk alone."""
    (x,) = batches(root, [9])
    model.train()
    reference.train()
    name = "1.running_mean"
    ours, theirs = (torch.full((3,), 5.0, dtype=torch.float64, device=root) for _ in range(2))
    before = {key: value.clone() for key, value in model.state_dict().items() if "num_batches" not in key}
    functional_call(model, {way[1] + name: ours}, (x,))
    functional_call(reference, {name: theirs}, (x[:3],))
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(model.state_dict()[way[1] + name], before[way[1] + name])


class TestInsideForward:
    """Each replica gives values to modules of its own."""

    class Gives(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = functional_call(self.a, {"weight": self.b.weight * 2, "bias": self.b.bias}, (x,))
            slope = torch.func.grad(lambda p: functional_call(self.a, p, (x,)).square().mean())(
                dict(self.a.named_parameters())
            )
            return y + self.a(x) + torch.func.vmap(self.b)(x) + 0 * slope["weight"].sum()

    @pytest.mark.slots(2, 3)
    def test_training_equals_one_device(self, slots, root):
        for wrap in FORMS.values():
            modules = []
            for _ in range(2):
                torch.manual_seed(0)
                modules.append(self.Gives().double().to(root))
            assert_trains_alike(wrap(modules[0], slots), modules[1], root)


class TestRefused:
    @pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
    def test_values_for_sharded_parameters(self, slots, root, x, sharded):
        """The module would keep them, and what they were computed from would get no gradient."""
        model, reference = fully_shard(build(root).eval(), devices=slots), build(root).eval()
        leaves = leaves_for(reference)
        if sharded:
            leaves = {name: distribute_tensor(leaf, slots, Shard(0)) for name, leaf in leaves.items()}
        for values in (leaves, {name: leaf * 2 for name, leaf in leaves.items()}):
            with pytest.raises(RuntimeError, match=r"is no parameter, as torch\.func\.functional_call does"):
                functional_call(model, values, (x,))
            model.zero_grad()
            reference.zero_grad()
            model(x).square().sum().backward()
            reference(x).square().sum().backward()
            ours = [whole(parameter.grad) for parameter in model.parameters()]
            torch.testing.assert_close(ours, [parameter.grad for parameter in reference.parameters()])
