"""The methods of a fully sharded module set how its units behave, and its calls in a replica run inside the unit.

What they change is in test_fully_shard_settings, gathers by hand are in test_fully_shard_calls.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dataparallel.composable import FullyShardedModule, fully_shard, register_forward_method
from dataparallel.forms import fully_shard as form
from dataparallel.replicas.build import build_replica
from dataparallel.replicas.plan import TWIN_INFO, ModulePlan, TwinInfo
from dataparallel.sharded import ShardedTensor
from dataparallel.sharded.units.slot_unit import SlotUnit

pytestmark = pytest.mark.slots(4)


@pytest.fixture
def net(root, slots):
    """A root unit, a unit of one module and a unit of two."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)).to(root)
    fully_shard(net[1], devices=slots)
    fully_shard([net[2], net[3]], devices=slots)
    return fully_shard(net, devices=slots)


def unit(module):
    return fully_shard.state(module).unit


def units(net):
    return [unit(net), unit(net[1]), unit(net[2])]


FLAGS = [
    ("set_requires_gradient_sync", "requires_gradient_sync", False),
    ("set_reshard_after_backward", "reshard_after_backward", False),
    ("set_reshard_after_forward", "reshard_after_forward", 2),
]


class TestFlags:
    @pytest.mark.parametrize(
        ("method", "name", "value"),
        [
            *FLAGS,
            ("set_gradient_divide_factor", "gradient_divide_factor", 2.0),
            ("set_unshard_in_backward", "unshard_in_backward", False),
            ("set_all_reduce_hook", "all_reduce_hook", torch.relu_),
            ("set_post_optim_event", "post_optim_event", SimpleNamespace()),
        ],
    )
    def test_are_set_for_one_unit(self, net, method, name, value):
        before = [getattr(each, name) for each in units(net)]
        getattr(net, method)(value, **({"recurse": False} if (method, name, value) in FLAGS else {}))
        assert [getattr(each, name) for each in units(net)] == [value, *before[1:]]

    @pytest.mark.parametrize(("method", "name", "value"), [*FLAGS, ("set_is_last_backward", "is_last_backward", False)])
    def test_or_for_the_whole_tree(self, net, method, name, value):
        getattr(net, method)(value)
        assert [getattr(each, name) for each in units(net)] == [value] * 3

    def test_a_module_of_a_list_sets_the_unit_of_the_list(self, net):
        net[3].set_requires_gradient_sync(False)
        assert [each.requires_gradient_sync for each in units(net)] == [True, True, False]

    def test_what_was_chosen_for_reshard_is_chosen_no_more(self, net):
        assert unit(net).is_reshard_automatic
        net.set_reshard_after_forward(True)
        assert not unit(net).is_reshard_automatic

    def test_all_reduce_can_be_of_the_module_alone(self, net):
        net.set_requires_all_reduce(False)
        net.set_requires_all_reduce(True, recurse=False)
        assert [each.requires_all_reduce for each in units(net)] == [True, False, False]

    @pytest.mark.parametrize("inner", [True, False])
    def test_no_sync_ends_with_what_was_before(self, net, inner):
        net[1].set_requires_gradient_sync(inner)
        with net.no_sync():
            assert [each.requires_gradient_sync for each in units(net)] == [False] * 3
        assert [each.requires_gradient_sync for each in units(net)] == [True, inner, True]
        with pytest.raises(KeyError), net.no_sync():
            raise KeyError
        assert [each.requires_gradient_sync for each in units(net)] == [True, inner, True]

    @pytest.mark.parametrize(
        ("method", "value", "error", "message"),
        [
            ("set_gradient_divide_factor", 0, ValueError, "factor=0: gradients are divided by a number above 0"),
            ("set_gradient_divide_factor", float("nan"), ValueError, "factor=nan"),
            ("set_all_reduce_hook", 3, TypeError, "hook=3: expected a function"),
            ("set_reshard_after_forward", None, TypeError, "reshard_after_forward=None"),
            ("set_reshard_after_forward", 3, ValueError, "groups of 3 slots do not divide 4 slots"),
        ],
    )
    def test_refused_values_change_nothing(self, net, method, value, error, message):
        before = [dict(vars(each)) for each in units(net)]
        with pytest.raises(error, match=message):
            getattr(net, method)(value)
        assert [dict(vars(each)) for each in units(net)] == before


@pytest.mark.parametrize("which", ["forward", "backward"])
class TestPrefetch:
    def test_takes_the_units_of_modules(self, net, which):
        getattr(net[1], f"set_modules_to_{which}_prefetch")([net[3], net])
        assert getattr(unit(net[1]), f"{which}_prefetch") == [unit(net[2]), unit(net)]
        getattr(net[1], f"set_modules_to_{which}_prefetch")([])
        assert getattr(unit(net[1]), f"{which}_prefetch") == []

    def test_foreign_modules_are_refused(self, net, slots, root, which):
        other = fully_shard(nn.Linear(2, 2).to(root), devices=slots)
        for module, message in (
            (net[0], r"modules\[1\], a Linear, is not fully sharded"),
            (other, r"modules\[1\], a Linear, is in no fully sharded tree with this Sequential"),
            (3, r"modules\[1\], a int, is not fully sharded"),
        ):
            with pytest.raises(ValueError, match=message):
                getattr(net, f"set_modules_to_{which}_prefetch")([net[1], module])
        assert getattr(unit(net), f"{which}_prefetch") is None

    def test_one_module_is_no_list(self, net, which):
        with pytest.raises(TypeError, match=r"expected a list of modules; got a Linear: write \[module\]"):
            getattr(net, f"set_modules_to_{which}_prefetch")(net[1])


def test_without_devices_methods_do_nothing(monkeypatch):
    monkeypatch.setattr(form, "resolve_slots", lambda *devices: [])
    net = nn.Sequential(nn.Linear(2, 2))
    for module in (net[0], net):
        fully_shard(module)
    state = fully_shard.state(net)
    state.unit = None  # no method may use it
    net.reshard()
    assert net.unshard() is None
    net.unshard(async_op=True).wait()
    with net.no_sync():
        net.set_requires_gradient_sync(False)
    net.set_is_last_backward(False)
    net.set_requires_all_reduce(False)
    net.set_reshard_after_forward(2)
    net.set_reshard_after_backward(False)
    net.set_modules_to_forward_prefetch([net[0]])
    net.set_modules_to_backward_prefetch([net[0]])
    net.set_post_optim_event(SimpleNamespace())
    net.set_gradient_divide_factor(2)
    net.set_unshard_in_backward(False)
    net.set_all_reduce_hook(print)
    assert net.double()[0].weight.dtype == torch.float64


class Net(nn.Module):
    """Notes what it has while it runs. The lists are the same in all replicas."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        self.seen = []
        self.ask = []  # functions of the replica

    def forward(self, x):
        self.note()
        for ask in self.ask:
            ask(self)
        return x * self.weight

    def note(self):
        self.seen.append(type(self.weight) is not ShardedTensor and self.weight.untyped_storage().nbytes() > 0)

    def generate(self, x):
        """Calls forward."""
        return self(x)

    def direct(self, x):
        return self.forward(x)


class Outer(nn.Module):
    """Runs a unit as it is told."""

    def __init__(self):
        super().__init__()
        self.inner = Net()
        self.weight = nn.Parameter(torch.full((2,), 5.0))
        self.run = [lambda inner, x: inner(x)]

    def forward(self, x):
        return self.run[0](self.inner, x) * self.weight


class TestInAReplica:
    @pytest.fixture
    def outer(self, slots, root):
        """A unit in another, on four slots."""
        outer = Outer().to(root)
        fully_shard(outer.inner, devices=slots)
        for name in ("generate", "direct"):
            register_forward_method(outer.inner, name)
        return fully_shard(outer, devices=slots)

    @pytest.fixture
    def log(self, outer, monkeypatch):
        """For each unit and slot what is called: gathers and their ends."""
        found = {name: [[] for _ in range(4)] for name in ("Net", "Outer")}

        def logged(name):
            method = getattr(SlotUnit, name)

            def call(self, *args):
                found["Outer" if self.unit is unit(outer) else "Net"][self.slot].append(name)
                return method(self, *args)

            return call

        for name in ("use", "end_use"):
            monkeypatch.setattr(SlotUnit, name, logged(name))
        return found

    @pytest.fixture
    def x(self, root):
        return torch.arange(8.0).reshape(4, 2).to(root)

    ONCE = [["use", "end_use"]] * 4

    @pytest.mark.parametrize(
        "run",
        [
            lambda inner, x: inner(x),
            lambda inner, x: inner.forward(x),
            lambda inner, x: inner.generate(x),
            lambda inner, x: inner.direct(x),
        ],
        ids=["a call", "forward", "a method that calls", "a method that calls forward"],
    )
    def test_it_runs_inside_the_unit_once(self, outer, log, run, x):
        outer.run[0] = run
        assert torch.equal(outer(x), x * 15)
        assert log["Net"] == log["Outer"] == self.ONCE
        assert outer.inner.seen == [True] * 4

    def test_hooks_run_inside_the_unit(self, outer, log, x):
        outer.inner.register_forward_pre_hook(lambda module, args: module.note())
        outer.inner.register_forward_hook(lambda module, args, output: module.note())
        outer(x)
        assert outer.inner.seen == [True] * 12
        assert log["Net"] == self.ONCE

    def test_an_error_leaves_the_unit(self, outer, log, x):
        def wrong(inner, x):
            inner(x, nothing=1)

        right, outer.run[0] = outer.run[0], wrong
        with pytest.raises(TypeError, match="nothing"):
            outer(x)
        assert all(calls.count("use") == calls.count("end_use") for calls in [*log["Net"], *log["Outer"]])
        assert not any(slot_unit.is_full for each in (unit(outer), unit(outer.inner)) for slot_unit in each.slot_units)
        outer.run[0] = right
        assert torch.equal(outer(x), x * 15)

    def test_the_parameters_are_sharded_before_and_after(self, outer, x):
        def note_around(inner, x):
            inner.note()
            output = inner(x)
            inner.note()
            return output

        outer.run[0] = note_around
        with torch.no_grad():
            outer(x)
        assert sorted(outer.inner.seen) == [False] * 8 + [True] * 4

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_recomputation_enters_the_unit_again(self, outer, log, use_reentrant, x):
        outer.run[0] = lambda inner, x: checkpoint(inner, x, use_reentrant=use_reentrant)
        x.requires_grad_()
        outer(x).sum().backward()
        assert log["Net"] == [["use", "end_use"] * 2] * 4
        assert outer.inner.seen == [True] * 8
        assert torch.equal(x.grad, torch.full_like(x, 15))

    @pytest.mark.parametrize(
        "call",
        [lambda net: net.unshard(), lambda net: net.set_is_last_backward(True), lambda net: net.no_sync().__enter__()],
    )
    def test_methods_are_refused(self, outer, call, x):
        outer.inner.ask.append(call)
        with pytest.raises(RuntimeError, match="this Net is a replica on one slot; call the methods of fully_shard on"):
            outer(x)


def test_a_tree_with_units_can_be_planned_for_its_own_form_alone(net):
    root = nn.Sequential(net[1], nn.Tanh())
    with pytest.raises(RuntimeError, match=r"^cannot replicate '0', a Linear: it is managed by `fully_shard` already"):
        ModulePlan.of(root)
    vars(root)[TWIN_INFO] = TwinInfo(id(root), allowed=FullyShardedModule)
    plan = ModulePlan.of(root)
    assert plan.is_plain
    replica = build_replica(plan, [torch.ones(tensor.shape) for tensor in plan.tensors], False)
    assert type(replica[0]) is type(net[1])
    assert fully_shard.state(replica[0]) is fully_shard.state(net[1])
