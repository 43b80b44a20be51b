"""A form that nests is applied to children, then to their parents, or to a list of modules; one tree has one form."""

import pytest
import torch
from torch import nn

from dataparallel.composable.contract import Form, are_in_one_tree
from dataparallel.composable.managed import KEY, ManagedModule, original_class, own_modules, own_parameters
from dataparallel.composable.replaced_parameters import remember


class Nested(ManagedModule):
    """A form's class that does nothing."""


class Alone(ManagedModule):
    """The class of a form that does not nest."""


class State:
    """Manages these parameters."""

    def __init__(self, parameters):
        self.ids = {id(parameter) for parameter in parameters}
        self.began = None

    def manages(self, parameter):
        return id(parameter) in self.ids


def prepare(modules, *, fails=False) -> State:
    named = own_parameters(modules)
    nest.check_unshared(named)
    state = State([parameter for _, parameter in named])
    state.fails = fails
    return state


def begin(modules, state):
    assert all(nest.state(module) is state for module in modules)
    if state.fails:
        raise MemoryError("no room")
    state.began = modules


def prepare_alone(module) -> State:
    return State(module.parameters())


prepare.__name__, prepare_alone.__name__ = "nest", "alone"
nest = Form(prepare, Nested, nests=True, begin=begin)
alone = Form(prepare_alone, Alone)


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)), nn.Linear(1, 1))


def managed(net):
    return [name for name, module in net.named_modules() if KEY in vars(module)]


class TestChildrenAndThenParents:
    def test_each_has_its_own_state(self, net):
        for module in (net[1][0], net[1], net):
            assert nest(module) is module
            assert nest.state(module).began == [module]
        assert len({id(nest.state(module)) for module in (net[1][0], net[1], net)}) == 3
        assert managed(net) == ["", "1", "1.0"]

    def test_a_parameter_belongs_to_the_innermost(self, net):
        nest(net[1])
        nest(net)
        weight = net[1][0].weight
        assert nest.state(net[1]).manages(weight)
        assert not nest.state(net).manages(weight)
        assert nest.state(net).manages(net[2].weight)

    def test_a_second_time_is_refused(self, net):
        nest(net)
        with pytest.raises(RuntimeError, match=r"the Sequential is managed by `nest` already; apply it once to each"):
            nest(net)

    def test_a_child_after_its_parent_is_refused(self, net):
        nest(net)
        message = r"the module is '1\.0' in a Sequential .* `nest` already.* Apply `nest` to children before their par"
        with pytest.raises(RuntimeError, match=message):
            nest(net[1][0])
        assert managed(net) == [""]


class TestOtherForms:
    @pytest.mark.parametrize(
        ("first", "then", "message"),
        [
            (nest, alone, r"cannot apply `alone`: its child '1' is managed by `nest` already; apply one form"),
            (alone, nest, r"cannot apply `nest`: its child '1' is managed by `alone` already; one tree has one form"),
        ],
    )
    def test_not_on_a_parent(self, net, first, then, message):
        first(net[1])
        with pytest.raises(RuntimeError, match=message):
            then(net)
        assert managed(net) == ["1"]

    @pytest.mark.parametrize(("first", "then"), [(nest, alone), (alone, nest)])
    def test_not_on_a_child(self, net, first, then):
        first(net)
        message = f"cannot apply `{then.__name__}`: the module is '1' in a Sequential .*`{first.__name__}` already"
        with pytest.raises(RuntimeError, match=message) as raised:
            then(net[1])
        assert "before their parents" not in str(raised.value)

    @pytest.mark.parametrize(("first", "then"), [(nest, alone), (alone, nest)])
    def test_not_on_a_module_that_shares_a_parameter(self, net, first, then):
        other = nn.Linear(1, 1)
        other.weight = net[2].weight
        first(other)
        with pytest.raises(RuntimeError, match=rf"'2\.weight' is shared.*'weight' of a Linear .*`{first.__name__}`"):
            then(net)
        assert managed(net) == []


class TestTiedParameters:
    def test_within_one_unit(self, net):
        net[1][1].weight = net[2].weight
        nest(net[0])
        nest(net)
        assert nest.state(net).manages(net[2].weight)

    @pytest.mark.parametrize("parent", [True, False], ids=["parent", "sibling"])
    def test_across_units_are_refused(self, net, parent):
        net[1][1].weight = net[2].weight
        nest(net[1])
        message = (
            r"parameter '(2\.)?weight' is shared with a module outside: it is '1\.weight' of a Sequential that is "
            r"managed by `nest` already\. Pass the modules that use it as one list, `nest\(\[a, b\]\)`"
        )
        with pytest.raises(RuntimeError, match=message):
            nest(net if parent else net[2])
        assert managed(net) == ["1"]

    @pytest.mark.parametrize("form", [nest, alone])
    def test_one_that_the_other_unit_has_replaced(self, net, form):
        """It is no parameter of the other unit any more, so the tie is found in what was replaced."""
        weight = net[2].weight
        child = nest(net[1][1])
        child.weight = nn.Parameter(weight.detach())
        remember([("weight", weight, child.weight)], "Linear", "nest")
        with pytest.raises(
            RuntimeError, match=r"parameter 'weight' is shared.*: it was 'weight' of a Linear .* `nest`"
        ):
            form(net[2])
        assert managed(net) == ["1.1"]

    def test_one_list_of_both_modules(self, net):
        net[1][1].weight = net[2].weight
        both = [net[1], net[2]]
        nest(both)
        assert nest(net) is net

    def test_a_module_in_two_units_is_refused_and_one_of_its_own_is_not(self, net):
        shared = nn.Linear(1, 1)
        first, second = nn.Sequential(shared), nn.Sequential(shared)
        nest(first)
        with pytest.raises(RuntimeError, match="used in two places, apply `nest` to that module first"):
            nest(second)
        shared = nest(nn.Linear(1, 1))
        for unit in (nn.Sequential(shared), nn.Sequential(shared)):
            nest(unit)


class TestLists:
    def test_all_modules_share_one_state(self, net):
        both = [net[0], net[2]]
        assert nest(both) is both
        assert nest.state(net[0]) is nest.state(net[2])
        assert nest.state(net[0]).began == both
        assert [original_class(type(module)) for module in both] == [nn.Linear, nn.Linear]

    @pytest.mark.parametrize("empty", [[], ()])
    def test_an_empty_one(self, empty):
        with pytest.raises(ValueError, match="`nest` got an empty list"):
            nest(empty)

    def test_an_item_that_is_no_module(self, net):
        with pytest.raises(TypeError, match=r"`nest` takes a list of torch\.nn\.Module; item 1 is 3"):
            nest([net, 3])

    @pytest.mark.parametrize("what", [3, None, nn.Linear, "net"])
    def test_what_is_neither(self, what):
        with pytest.raises(TypeError, match=r"`nest` takes a torch\.nn\.Module or a list of them; got"):
            nest(what)

    @pytest.mark.parametrize("turn", [False, True])
    def test_one_that_holds_another(self, net, turn):
        both = [net, net[1][0]][:: -1 if turn else 1]
        message = f"item {0 if turn else 1}, a Linear, is '1.0' in item {1 if turn else 0}, so leave it out"
        with pytest.raises(ValueError, match=message):
            nest(both)

    def test_one_twice(self, net):
        with pytest.raises(ValueError, match="item 1, a Sequential, is item 0 too"):
            nest([net, net])

    def test_one_refused_module_leaves_all_as_they_were(self, net):
        nest(net[1])
        with pytest.raises(RuntimeError, match="the Sequential is managed by `nest` already"):
            nest([net[0], net[1]])
        assert managed(net) == ["1"]


class TestAFormThatCannotBegin:
    def test_the_modules_are_what_they_were(self, net):
        with pytest.raises(MemoryError, match="no room"):
            nest([net[0], net[1]], fails=True)
        assert managed(net) == []
        assert [type(module) for module in net] == [nn.Linear, nn.Sequential, nn.Linear]
        nest([net[0], net[1]])

    def test_a_class_that_cannot_be_changed_leaves_the_others_as_they_were(self, net):
        class Fixed(nn.Linear):
            def __init_subclass__(cls):
                raise TypeError("final")

        with pytest.raises(TypeError, match="final"):
            nest([net[0], Fixed(1, 1), net[2]])
        assert managed(net) == []
        assert type(net[0]) is nn.Linear


class TestTheUnit:
    def test_has_the_modules_that_no_child_unit_has(self, net):
        nest(net[1])
        assert [name for name, _ in own_modules([net])] == ["", "0", "2"]
        assert [name for name, _ in own_modules([net[1]])] == ["", "0", "1"]

    def test_has_names_in_the_order_of_torch(self, net):
        assert [name for name, _ in own_modules([net])] == [name for name, _ in net.named_modules()]
        assert [name for name, _ in own_parameters([net])] == [name for name, _ in net.named_parameters()]

    def test_of_a_list_has_names_with_the_number(self, net):
        assert [name for name, _ in own_modules([net[0], net[1]])] == ["0", "1", "1.0", "1.1"]

    def test_has_each_module_and_parameter_once(self, net):
        net[0].again = net[2]
        net[1][0].weight = net[2].weight
        assert [name for name, _ in own_modules([net])] == ["", "0", "0.again", "1", "1.0", "1.1"]
        assert [name for name, _ in own_parameters([net])] == [name for name, _ in net.named_parameters()]


def test_two_modules_are_in_one_tree_once_a_managed_one_holds_both(net):
    nest(net[0])
    nest(net[2])
    assert are_in_one_tree(net[0], net[0])
    assert not are_in_one_tree(net[0], net[2])
    nest(net)
    assert are_in_one_tree(net[0], net[2])
    assert are_in_one_tree(net[0], net)


def test_a_form_shows_that_it_takes_a_list():
    assert "Sequence" in str(nest.__signature__)
    assert "Sequence" not in str(alone.__signature__)
    assert torch.is_tensor(nest(nn.Linear(1, 1))(torch.ones(1, 1)))
