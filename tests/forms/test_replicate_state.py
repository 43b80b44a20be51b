"""A call of a replicated module runs on its slots, and equals one device.

That nothing else about the module changes is in test_composable_replicate.
"""

import types

import pytest
import torch
from torch import nn

import dataparallel
from affine import Affine
from dataparallel import DataParallel, data_parallel
from dataparallel.composable import fully_shard, register_forward_method, replicate
from dataparallel.replicas import kept_replicas


def frozen(module, slots):
    """A wrapper that keeps replicas inside `frozen`."""
    wrapped = DataParallel(module, slots)

    def run(x):
        with wrapped.frozen(), torch.no_grad():
            return wrapped(x)

    return run


def without_graph(module, slots):
    """A wrapper that keeps replicas between calls."""
    wrapped = DataParallel(module, slots)
    return torch.no_grad()(lambda x: wrapped(x))


WAYS_TO_REPLICATE = {
    "composable": lambda module, slots: replicate(module, devices=slots),
    "DataParallel": DataParallel,
    "without a graph": without_graph,
    "frozen": frozen,
    "data_parallel": lambda module, slots: lambda x: data_parallel(module, x, slots),
    "replicate": lambda module, slots: lambda x: dataparallel.replicate(module, slots),
    "detached": lambda module, slots: lambda x: dataparallel.replicate(module, slots, detach=True),
}
"""Each has the module replicated, and returns a function that calls it."""


class TestCall:
    @pytest.mark.parametrize(("broadcast_buffers", "expected"), [(True, [4, 6, 6]), (False, [2, 6, 6])])
    def test_buffers_are_sent_at_each_call_or_once(self, slots, root, batch, broadcast_buffers, expected):
        counts = []

        class Counts(Affine):
            def forward(self, x):
                self.calls += len(x)
                counts.append(int(self.calls))
                return self.linear(x)

        module = replicate(Counts().double().to(root), devices=slots, broadcast_buffers=broadcast_buffers)
        module(batch)
        counts.clear()
        module(batch)
        assert sorted(counts) == expected

    @pytest.mark.parametrize(("first", "others", "expected"), [(1, 1, 1), (64 / 2**20, 1, 2), (1e-9, 1e-9, 4)])
    def test_buckets_have_the_sizes_that_were_given(self, slots, root, batch, first, others, expected):
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double().to(root)
        replicate(net, devices=slots, first_bucket_mb=first, bucket_cap_mb=others)
        for _ in range(2):  # in the first one the order of gradients is learnt
            net(batch).sum().backward()
        assert len(replicate.state(net).tensors.copies.buckets) == expected

    @pytest.mark.parametrize("has_hooks", [False, True])
    def test_the_tree_is_recognised_at_the_next_call(self, affine, slots, batch, has_hooks, monkeypatch):
        if has_hooks:  # replicas of the module itself have none, so they are kept all the same
            affine.register_forward_hook(lambda module, args, output: output + 1)
        replicate(affine, devices=slots)
        affine(batch)
        made = []
        of = kept_replicas.ModulePlan.of
        monkeypatch.setattr(
            kept_replicas.ModulePlan, "of", lambda network, *call: made.append(network) or of(network, *call)
        )
        affine(batch)
        assert not made
        affine.new = 1
        affine(batch)
        assert len(made) == 1


class TestHooks:
    def test_a_method_that_calls_the_module_runs_them_in_each_replica(self, affine, slots, batch):
        affine.register_forward_hook(lambda module, args, output: output + 1)
        affine.twice = types.MethodType(lambda self, x: 2 * self(x), affine)
        expected = affine.twice(batch)
        register_forward_method(replicate(affine, devices=slots), "twice")
        for _ in range(2):
            torch.testing.assert_close(affine.twice(batch), expected)
            torch.testing.assert_close(2 * affine(batch), expected)


class TestErrors:
    def test_a_tree_that_cannot_be_replicated(self, affine, slots, batch):
        replicate(affine, devices=slots)
        affine.linear.forward = torch.compile(affine.linear.forward, backend="eager")
        with pytest.raises(RuntimeError, match=r"cannot replicate 'linear\.forward': it was compiled"):
            affine(batch)

    @pytest.mark.parametrize("apply", WAYS_TO_REPLICATE.values(), ids=WAYS_TO_REPLICATE)
    @pytest.mark.parametrize("inside", [replicate, fully_shard])
    def test_a_managed_module_inside_another_tree(self, slots, root, batch, apply, inside):
        """The error has its path in that tree. Without it the tree can be replicated."""
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        outer = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": layers})}).double().to(root)
        outer.forward = types.MethodType(lambda self, x: self["encoder"]["layers"][0](x), outer)
        run = apply(outer, slots)
        run(batch)
        layers.append(inside(nn.Linear(4, 4).double().to(root), devices=slots))
        refused = rf"^cannot replicate 'encoder\.layers\.3', a Linear: it is managed by `{inside.__name__}` already"
        with pytest.raises(RuntimeError, match=refused):
            run(batch)
        del layers[3]
        run(batch)

    @pytest.mark.parametrize("apply", [*WAYS_TO_REPLICATE.values()][1:], ids=[*WAYS_TO_REPLICATE][1:])
    def test_a_module_that_is_replicated_while_it_is_wrapped(self, affine, slots, batch, apply):
        run = apply(affine, slots)
        run(batch)
        replicate(affine, devices=slots)
        with pytest.raises(RuntimeError, match=r"^cannot replicate the Affine: it is managed by `replicate` already"):
            run(batch)

    def test_a_class_that_has_changed_since(self, slots, root, batch):
        module = replicate(nn.Linear(4, 3).double().to(root), devices=slots)
        nn.utils.parametrizations.weight_norm(module)
        with pytest.raises(RuntimeError, match="the class of this Linear is another one than `replicate` gave to it"):
            module(batch)

    def test_a_method_that_raises(self, affine, slots, batch):
        def odd(self, x):
            raise IndexError(len(x))

        replicate(affine, devices=slots)
        affine.odd = types.MethodType(odd, affine)
        register_forward_method(affine, "odd")
        with pytest.raises(IndexError, match="3"):
            affine.odd(batch)
