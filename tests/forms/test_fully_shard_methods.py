"""The methods of a fully sharded module set how its units behave, and its calls in a replica run inside the unit.

What they change is in test_fully_shard_settings, gathers by hand are in test_fully_shard_between_calls.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dataparallel.composable import fully_shard
from dataparallel.forms import fully_shard as form
from dataparallel.sharded import ShardedTensor

pytestmark = pytest.mark.slots(4)


@pytest.fixture
def net(root, slots):
    """A root unit, a unit of one module and a unit of two."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)).to(root)
    fully_shard(net[1], devices=slots)
    fully_shard([net[2], net[3]], devices=slots)
    return fully_shard(net, devices=slots)


class TestFlags:
    def test_a_module_of_a_list_sets_the_unit_of_the_list(self, net, root):
        net[3].set_requires_gradient_sync(False)
        net(torch.ones(4, 4, device=root)).sum().backward()
        waits = [not parameter.grad.full_tensor().any() for layer in net for parameter in layer.parameters()]
        assert waits == [False] * 4 + [True] * 4

    def test_groups_that_do_not_divide_the_slots_are_refused(self, net):
        with pytest.raises(ValueError, match="groups of 3 slots do not divide 4 slots"):
            net.set_reshard_after_forward(3)


@pytest.mark.parametrize("which", ["forward", "backward"])
class TestPrefetch:
    def test_foreign_modules_are_refused(self, net, slots, root, which):
        other = fully_shard(nn.Linear(2, 2).to(root), devices=slots)
        for module, message in (
            (net[0], r"modules\[1\], a Linear, is not fully sharded"),
            (other, r"modules\[1\], a Linear, is in no fully sharded tree with this Sequential"),
            (3, r"modules\[1\], a int, is not fully sharded"),
        ):
            with pytest.raises(ValueError, match=message):
                getattr(net, f"set_modules_to_{which}_prefetch")([net[1], module])

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


class TestInAReplica:
    def test_a_unit_has_its_parameters_while_it_and_its_hooks_run(self, net, root):
        seen = []

        net[1].register_forward_pre_hook(lambda module, args: seen.append(isinstance(module.weight, ShardedTensor)))
        net[1].register_forward_hook(lambda module, *_: seen.append(isinstance(module.weight, ShardedTensor)))
        net(torch.ones(4, 4, device=root))
        assert seen == [False] * 8

    @pytest.mark.parametrize(
        "call",
        [
            lambda net: net.unshard(),
            lambda net: net.set_unshard_in_backward(True),
            lambda net: net.no_sync().__enter__(),
        ],
    )
    def test_methods_are_refused(self, net, call, root):
        net[1].register_forward_pre_hook(lambda module, args: call(module))
        with pytest.raises(RuntimeError, match="this Linear is a replica on one slot; call the methods of fully_shard"):
            net(torch.ones(4, 4, device=root))
