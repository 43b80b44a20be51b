"""A call of a replicated module runs on its slots, and equals one device.

That nothing else about the module changes is in test_composable_replicate.
"""

import copy
import gc
import types
import weakref

import pytest
import torch
from torch import nn

import dataparallel
from affine import Affine
from dataparallel import DataParallel, data_parallel
from dataparallel.composable import register_forward_method, replicate
from dataparallel.kept import replicas


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


class Failing(Affine):
    fails = True

    def forward(self, x):
        if self.fails and len(x) == 1:
            raise KeyError("odd")
        return super().forward(x)


class TestCall:
    def test_inputs_are_scattered_and_outputs_gathered(self, affine, slots, batch):
        expected = affine(batch, scale=2.0)
        affine.sizes.clear()
        replicate(affine, devices=slots)
        torch.testing.assert_close(affine(batch, scale=2.0), expected)
        assert sorted(affine.sizes) == [1, 3, 3]

    def test_output_device_cpu(self, affine, slots, batch):
        assert replicate(affine, devices=slots, output_device="cpu")(batch).device.type == "cpu"

    def test_dim_one(self, root, slots):
        module = nn.Linear(4, 3).double().to(root)
        x = torch.randn(5, 7, 4, dtype=torch.float64, device=root)
        expected = module(x)
        torch.testing.assert_close(replicate(module, devices=slots, dim=1)(x), expected)

    def test_attributes_that_instances_keep_in_slots(self, slots, root, batch):
        class Slotted(nn.Linear):
            __slots__ = ("factor", "unset")

            def forward(self, x):
                return super().forward(x) * self.factor

        module = Slotted(4, 3).double().to(root)
        module.factor = 2.0
        expected = module(batch)
        torch.testing.assert_close(replicate(module, devices=slots)(batch), expected)

    def test_no_arguments_run_one_replica(self, slots, root):
        class Constant(nn.Module):
            def forward(self):
                return torch.ones(2, device=root)

        assert replicate(Constant(), devices=slots)().shape == (2,)

    def test_a_single_slot_runs_the_module_itself(self, affine, root, batch):
        replicate(affine, devices=[root], output_device="cpu")
        seen = []
        affine.linear.register_forward_hook(lambda module, args, output: seen.append(module))
        assert affine(batch).device.type == "cpu"
        assert seen == [affine.linear]

    def test_without_accelerator_the_module_is_just_called(self, affine, batch, monkeypatch):
        monkeypatch.setattr("dataparallel.devices.all_devices", list)
        replicate(affine)
        affine(batch)
        assert affine.sizes == [7]

    def test_what_the_module_is_at_the_call_counts(self, affine, slots, batch):
        replicate(affine, devices=slots)
        affine(batch)
        affine.linear = nn.Linear(4, 2).double().to(batch.device)
        affine.eval()
        assert affine(batch).shape == (7, 2)
        affine.linear.weight = nn.Parameter(torch.ones_like(affine.linear.weight))
        affine.linear.bias.requires_grad_(False)
        output = affine(batch)
        torch.testing.assert_close(output, affine.linear(batch))
        output.sum().backward()
        assert affine.linear.bias.grad is None
        torch.testing.assert_close(affine.linear.weight.grad, batch.sum(0).expand(2, 4))

    def test_buffers_changed_in_place_on_slot_0_stay(self, affine, slots, batch):
        replicate(affine, devices=slots)
        affine(batch)
        affine(batch)
        assert affine.calls == 2

    def test_it_may_be_materialised_between(self, slots, root):
        module = replicate(nn.Linear(4, 3, device="meta"), devices=slots)
        module.to_empty(device=root)
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
        torch.testing.assert_close(module(torch.ones(7, 4, device=root)), torch.full((7, 3), 4.0, device=root))

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
        of = replicas.ModulePlan.of
        monkeypatch.setattr(
            replicas.ModulePlan, "of", lambda network, *call: made.append(network) or of(network, *call)
        )
        affine(batch)
        assert not made
        affine.new = 1
        affine(batch)
        assert len(made) == 1

    def test_nothing_is_left_when_the_module_is_gone(self, affine, slots, batch):
        module = replicate(nn.Sequential(affine), devices=slots)
        module(batch).sum().backward()
        gc.collect()
        gc.disable()
        try:
            gone = weakref.ref(module)
            del module
            assert gone() is None
        finally:
            gc.enable()

    def test_torch_compile_around_the_call_runs_the_same_numbers(self, affine, slots, batch):
        expected = affine(batch * 2) + 1
        replicate(affine, devices=slots)
        compiled = torch.compile(lambda x: affine(x * 2) + 1, backend="eager")
        torch.testing.assert_close(compiled(batch), expected)
        torch.testing.assert_close(torch.compile(affine, backend="eager")(batch * 2) + 1, expected)
        assert sorted(affine.sizes) == [1, 1, 3, 3, 3, 3, 7]


class TestHooks:
    def test_those_on_the_module_run_once_on_the_whole_batch(self, affine, slots, batch):
        replicate(affine, devices=slots)
        seen = []
        affine.register_forward_pre_hook(lambda module, args: seen.append(("pre", module, len(args[0]))))
        affine.register_forward_hook(lambda module, args, output: seen.append(("forward", module, len(output))))
        affine.register_full_backward_hook(lambda module, ins, outs: seen.append(("backward", module, len(outs[0]))))
        affine(batch.requires_grad_()).sum().backward()
        assert seen == [("pre", affine, 7), ("forward", affine, 7), ("backward", affine, 7)]

    def test_what_they_return_is_used(self, affine, slots, batch):
        expected = affine(batch * 2) + 1
        affine.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        replicate(affine, devices=slots)
        affine.register_forward_hook(lambda module, args, output: output + 1)
        torch.testing.assert_close(affine(batch), expected)

    def test_those_on_children_run_in_each_replica(self, affine, slots, batch):
        seen = []
        affine.linear.register_forward_hook(lambda module, args, output: seen.append((module, len(output))))
        replicate(affine, devices=slots)
        affine(batch)
        assert sorted(size for _, size in seen) == [1, 3, 3]
        assert all(module is not affine.linear for module, _ in seen)

    def test_a_method_that_calls_the_module_runs_them_in_each_replica(self, affine, slots, batch):
        affine.register_forward_hook(lambda module, args, output: output + 1)
        affine.twice = types.MethodType(lambda self, x: 2 * self(x), affine)
        expected = affine.twice(batch)
        register_forward_method(replicate(affine, devices=slots), "twice")
        for _ in range(2):
            torch.testing.assert_close(affine.twice(batch), expected)
            torch.testing.assert_close(2 * affine(batch), expected)

    def test_a_call_that_the_class_overrides_runs_once(self, slots, root, batch):
        class Doubles(Affine):
            def __call__(self, x):
                return 2 * super().__call__(x)

        module = Doubles().double().to(root)
        expected = module(batch)
        torch.testing.assert_close(replicate(module, devices=slots)(batch), expected)


class TestErrors:
    def test_parameter_on_meta(self, affine, slots, batch, root):
        affine.linear.bias = nn.Parameter(torch.empty(3, device="meta"))
        replicate(affine, devices=slots)
        with pytest.raises(RuntimeError, match=r"parameter 'linear\.bias'.* materialise it first") as caught:
            affine(batch)
        assert f"module.to_empty(device='{root}')" in str(caught.value)

    def test_a_tree_that_cannot_be_replicated(self, affine, slots, batch):
        replicate(affine, devices=slots)
        affine.linear.forward = torch.compile(affine.linear.forward, backend="eager")
        with pytest.raises(RuntimeError, match=r"cannot replicate 'linear\.forward': it was compiled"):
            affine(batch)

    @pytest.mark.parametrize("apply", WAYS_TO_REPLICATE.values(), ids=WAYS_TO_REPLICATE)
    def test_a_replicated_module_inside_another_tree(self, slots, root, batch, apply):
        """The error has its path in that tree. Without it the tree can be replicated."""
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        outer = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": layers})}).double().to(root)
        outer.forward = types.MethodType(lambda self, x: self["encoder"]["layers"][0](x), outer)
        run = apply(outer, slots)
        run(batch)
        layers.append(replicate(nn.Linear(4, 4).double().to(root), devices=slots))
        refused = r"^cannot replicate 'encoder\.layers\.3', a Linear: it is managed by `replicate` already"
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

    def test_a_functorch_transform_around_the_call(self, affine, slots, batch):
        expected = affine(batch)
        replicate(affine, devices=slots)
        with pytest.raises(RuntimeError, match=r"torch\.func transform"):
            torch.func.vmap(affine)(batch.unsqueeze(1))
        torch.testing.assert_close(affine(batch), expected)

    def test_a_class_that_has_changed_since(self, slots, root, batch):
        module = replicate(nn.Linear(4, 3).double().to(root), devices=slots)
        nn.utils.parametrizations.weight_norm(module)
        with pytest.raises(RuntimeError, match="the class of this Linear is another one than `replicate` gave to it"):
            module(batch)

    def test_a_replica_that_raises_leaves_the_module_as_it_was(self, slots, root, batch):
        torch.manual_seed(0)
        module = replicate(Failing().double().to(root), devices=slots)
        before = copy.deepcopy(module.linear.state_dict())
        with pytest.raises(KeyError, match="odd"):
            module(batch)
        assert all(torch.equal(value, before[key]) for key, value in module.linear.state_dict().items())
        module.fails = False
        torch.testing.assert_close(module(batch), module.linear(batch))

    def test_a_method_that_raises(self, affine, slots, batch):
        def odd(self, x):
            raise IndexError(len(x))

        replicate(affine, devices=slots)
        affine.odd = types.MethodType(odd, affine)
        register_forward_method(affine, "odd")
        with pytest.raises(IndexError, match="3"):
            affine.odd(batch)
