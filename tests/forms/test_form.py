"""A composable form is applied once, to trees that share nothing, and other code does not see it.

What a form does with its arguments is in the form's own files.
"""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

from dataparallel.composable import FullyShardedModule, ReplicatedModule, fully_shard, replicate
from dataparallel.replicas.plan import FORM_ATTRIBUTE, original_class
from each_form import composable_forms

BOTH = pytest.mark.parametrize("apply", [replicate, fully_shard], ids=["replicate", "fully_shard"])


@pytest.fixture
def net(root):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4)).double().to(root)


def managed(net):
    return [name for name, module in net.named_modules() if FORM_ATTRIBUTE in vars(module)]


@composable_forms
class TestTheModuleIsWhatItWas:
    def test_the_same_object_of_a_subclass_that_keeps_its_name(self, net, form, slots):
        # transformers writes the name into config.json, and shifts labels for the classes that it knows.
        assert form(net, slots) is net
        assert isinstance(net, nn.Sequential)
        assert isinstance(net, (ReplicatedModule, FullyShardedModule))
        assert original_class(type(net)) is nn.Sequential
        assert (type(net).__name__, type(net).__module__) == ("Sequential", nn.Sequential.__module__)
        assert type(net).__qualname__ in ("ReplicateSequential", "FullyShardSequential")

    def test_names_keys_and_repr_stay(self, net, form, slots):
        def seen():
            return [
                [*net.state_dict()],
                *([name for name, _ in each()] for each in (net.named_modules, net.named_parameters)),
                repr(net),
            ]

        before = seen()
        form(net, slots)
        assert seen() == before

    def test_containers_and_instances_of_its_class_are_plain(self, net, form, slots):
        first, middle, last = net
        form(net, slots)
        assert [*net] == [first, middle, last]
        assert type(net[1:]) is type(type(net)()) is nn.Sequential
        assert net[1:][1] is last

    @pytest.mark.parametrize(
        ("what", "copied"),
        [
            ("copy", copy.copy),
            ("deepcopy", copy.deepcopy),
            ("pickle", pickle.dumps),
            ("pickle", lambda module: torch.save(module, io.BytesIO())),
            ("deepcopy", lambda module: copy.deepcopy(nn.Sequential(module))),
        ],
        ids=["copy", "deepcopy", "pickle", "save", "deepcopy of a parent"],
    )
    def test_copies_are_refused(self, net, form, slots, batch, what, copied):
        form(net, slots)(batch)
        with pytest.raises(TypeError, match=rf"cannot {what} .* `(replicate|fully_shard)`.*state_dict\(?"):
            copied(net)


class TestRefused:
    @BOTH
    @pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict])
    def test_a_container_without_forward(self, net, container, apply, slots):
        for given in [container(), *([[net, container()]] if apply is fully_shard else [])]:
            with pytest.raises(TypeError, match=f"a {container.__name__} has no forward of its own"):
                apply(given, devices=slots)
        assert managed(net) == []

    @BOTH
    @pytest.mark.filterwarnings("ignore:.*torch.jit")
    def test_a_script_module(self, net, apply, slots):
        script = torch.jit.script(net)
        with pytest.raises(TypeError, match=r"ScriptModule belongs? to"):
            apply(script, devices=slots)
        if apply is fully_shard:  # `replicate` replicates those that lie below a module of Python
            with pytest.raises(TypeError, match=r"cannot shard '0', a RecursiveScriptModule"):
                apply(nn.Sequential(script), devices=slots)

    @BOTH
    def test_a_module_that_has_the_form(self, net, apply, slots):
        apply(net, devices=slots)
        with pytest.raises(RuntimeError, match=f"the Sequential is managed by `{apply.__name__}` already"):
            apply(net, devices=slots)
        assert managed(net) == [""]

    @pytest.mark.parametrize(
        ("first", "then"), [(replicate, replicate), (replicate, fully_shard), (fully_shard, replicate)]
    )
    def test_a_parent_of_a_managed_module(self, net, first, then, slots):
        first(net[1], devices=slots)
        message = f"`{then.__name__}`: its child '1' is managed by `{first.__name__}` already; .*one"
        with pytest.raises(RuntimeError, match=message):
            then(net, devices=slots)
        assert managed(net) == ["1"]

    @pytest.mark.parametrize(
        ("first", "then"),
        [(replicate, replicate), (replicate, fully_shard), (fully_shard, replicate), (fully_shard, fully_shard)],
    )
    def test_a_child_of_one(self, net, first, then, slots):
        first(net, devices=slots)
        message = rf"`{then.__name__}`: the module is '1\.0' in a Sequential .*`{first.__name__}` already"
        with pytest.raises(RuntimeError, match=message) as raised:
            then(net[1][0], devices=slots)
        assert ("Apply `fully_shard` to children before their parents" in str(raised.value)) is (
            first is then is fully_shard
        )
        assert managed(net) == [""]

    @pytest.mark.parametrize("first", [replicate, fully_shard])
    @BOTH
    def test_a_module_that_shares_a_parameter_with_one(self, net, first, apply, slots):
        """A sharded module has other parameters since, so the tie shows in what they have replaced."""
        other = nn.Sequential(nn.Linear(4, 4).to(net[2].weight))
        other[0].weight = net[2].weight
        first(net, devices=slots)
        message = rf"'0\.weight' is shared.*it (is|was) '2\.weight' of a Sequential .*`{first.__name__}` already"
        with pytest.raises(RuntimeError, match=message):
            apply(other, devices=slots)
        assert type(other) is nn.Sequential
        assert managed(other) == []

    @BOTH
    def test_but_not_if_it_is_ignored_on_either_side_or_the_other_is_gone(self, net, apply, slots):
        weight = net[2].weight
        others = [nn.Sequential(nn.Linear(4, 4).to(weight)) for _ in range(3)]
        for other in others:
            other[0].weight = weight
        apply(others[0], devices=slots, ignored_params=[weight])
        if apply is replicate:
            apply(others.pop(), devices=slots)
            other = None
            gc.collect()
        apply(net, devices=slots)
        apply(others[1], devices=slots, ignored_params=[weight])


class TestTiesBetweenUnits:
    def test_within_one_unit_or_one_list(self, net, slots):
        net[1][1].weight = net[2].weight
        fully_shard(net[0], devices=slots)
        fully_shard([net[1], net[2]], devices=slots)
        assert net[1][1].weight is net[2].weight
        fully_shard(net, devices=slots)

    @pytest.mark.parametrize("parent", [True, False], ids=["parent", "sibling"])
    def test_across_units_are_refused(self, net, slots, parent):
        net[1][1].weight = net[2].weight
        fully_shard(net[1], devices=slots)
        message = (
            r"parameter '(2\.)?weight' is shared with a module outside: it was '1\.weight' of a Sequential that is "
            r"managed by `fully_shard` already\. Pass the modules that use it as one list, `fully_shard\(\[a, b\]\)`"
        )
        with pytest.raises(RuntimeError, match=message):
            fully_shard(net if parent else net[2], devices=slots)
        assert managed(net) == ["1"]

    def test_a_module_in_two_units_is_refused_and_a_unit_in_two_is_not(self, slots, root):
        shared = nn.Linear(1, 1).to(root)
        first, second = nn.Sequential(shared), nn.Sequential(shared)
        fully_shard(first, devices=slots)
        with pytest.raises(RuntimeError, match="used in two places, apply `fully_shard` to that module first"):
            fully_shard(second, devices=slots)
        shared = fully_shard(nn.Linear(1, 1).to(root), devices=slots)
        for unit in (nn.Sequential(shared), nn.Sequential(shared)):
            fully_shard(unit, devices=slots)


class TestNamesOfAForm:
    @BOTH
    @pytest.mark.parametrize("how", ["method", "attribute", "child", "parameter"])
    def test_that_the_module_has_are_refused(self, apply, how, slots):
        class Net(nn.Linear):
            pass

        net = Net(2, 2)
        if how == "method":
            Net.no_sync = lambda self: 3
        else:
            net.no_sync = {"attribute": True, "child": nn.Linear(1, 1), "parameter": nn.Parameter(torch.ones(1))}[how]
        with pytest.raises(ValueError, match=r"this Net has \['no_sync'\], and the form gives its module methods"):
            apply(net, devices=slots)
        assert type(net) is Net


class TestLists:
    @pytest.mark.parametrize(
        ("made", "error", "message"),
        [
            (lambda net: [], ValueError, "`fully_shard` got an empty list"),
            (lambda net: (), ValueError, "`fully_shard` got an empty list"),
            (lambda net: [net, 3], TypeError, r"module\[1\]=3: expected a torch\.nn\.Module"),
            (lambda net: [net, net[1][0]], ValueError, "item 1, a Linear, is '1.0' in item 0, so leave it out"),
            (lambda net: [net[1][0], net], ValueError, "item 0, a Linear, is '1.0' in item 1, so leave it out"),
            (lambda net: [net, net], ValueError, "item 1, a Sequential, is item 0 too"),
        ],
        ids=["empty", "empty tuple", "no module", "one in another", "one around another", "one twice"],
    )
    def test_refused(self, net, made, error, message):
        with pytest.raises(error, match=message):
            fully_shard(made(net))

    def test_a_form_that_takes_none(self):
        with pytest.raises(TypeError, match=r"`replicate` takes a torch\.nn\.Module; got list"):
            replicate([nn.Linear(1, 1)])


class Around:
    """Stands in the place of a forward, and counts the dimensions that it keeps."""

    def __init__(self, forward, kept=4):
        self.forward, self.kept = forward, kept

    def __call__(self, x):
        return self.forward(x)[:, : self.kept]


class Deep(Around):
    def __init__(self, forward):
        self.parts = [[forward]]

    def __call__(self, x):
        return self.parts[0][0](x)


@pytest.mark.watchdog(60)
class TestAForwardThatAnObjectReplaces:
    @pytest.mark.slots(1, 3)
    def test_it_runs_in_the_replicas_with_its_attributes_of_that_time(self, net, form, slots, root):
        x = torch.randn(7, 4, dtype=torch.float64, device=root)
        expected = net(x)
        model, former = form(net, slots), net.forward
        net.forward = around = Around(former)
        for around.kept in (3, 1):
            torch.testing.assert_close(model(x), expected[:, : around.kept])
        net.forward = former
        torch.testing.assert_close(model(x), expected)

    @composable_forms
    def test_one_that_leads_to_the_module_elsewhere_is_refused_by_name(self, net, form, slots, root):
        model = form(net, slots)
        net.forward = Deep(net.forward)
        with pytest.raises(RuntimeError, match="its forward, which is a Deep, leads to the module where replicas can"):
            model(torch.randn(7, 4, dtype=torch.float64, device=root))
