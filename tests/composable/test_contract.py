"""A composable form is applied once, to trees that share nothing, and other code does not see it."""

import gc
import weakref

import pytest
import torch
from torch import nn

from dataparallel.composable.contract import Form
from dataparallel.composable.managed import KEY, ManagedModule, original_class
from dataparallel.modules.plan import ModulePlan


class State:
    """Manages all parameters except the ignored ones."""

    def __init__(self, ignored=()):
        self.ignored = ignored

    def manages(self, parameter):
        return all(parameter is not other for other in self.ignored)


class Twisted(ManagedModule):
    """A form's class that does nothing."""


class Renaming(ManagedModule):
    """A form's class under which parameters have other names."""

    def named_parameters(self, *args, **kwargs):
        return ((f"new.{name}", parameter) for name, parameter in super().named_parameters(*args, **kwargs))


def make(name, base=Twisted):
    def prepare(module, *, ignored=()) -> State:
        """Says what it does."""
        if module.__class__.__name__ == "Unfit":
            raise ValueError("unfit")
        return State(ignored)

    prepare.__name__ = name
    return Form(prepare, base)


twist, turn, rename = make("twist"), make("turn"), make("rename", Renaming)


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))


class TestApplication:
    def test_it_is_the_same_object_of_a_subclass(self, net):
        assert twist(net) is net
        assert isinstance(net, Twisted)
        assert isinstance(net, nn.Sequential)
        assert (type(net).__name__, type(net).__qualname__) == ("Sequential", "TwistSequential")
        assert original_class(type(net)) is nn.Sequential

    def test_there_is_one_class_for_each_original_class(self, net):
        assert type(twist(net)) is type(twist(nn.Sequential()))
        assert type(twist(nn.Linear(1, 1))) is not type(net)

    def test_its_state_is_found_by_the_form_that_made_it(self, net):
        assert twist.state(net) is None
        twist(net, ignored=[net[0].weight])
        assert twist.state(net).ignored == [net[0].weight]
        assert turn.state(net) is None
        assert twist.state(net[0]) is None

    def test_nobody_else_sees_the_state(self, net):
        keys, names = list(net.state_dict()), [name for name, _ in net.named_modules()]
        twist(net)
        assert list(net.state_dict()) == keys
        assert [name for name, _ in net.named_modules()] == names
        assert KEY in vars(net)

    def test_a_form_looks_like_its_function(self):
        assert twist.__doc__ == "Says what it does."
        assert twist.__name__ == "twist"

    def test_a_module_that_nobody_holds_is_gone(self, net):
        gc.collect()
        gc.disable()
        try:
            gone = weakref.ref(twist(nn.Sequential(net)))
            assert gone() is None
        finally:
            gc.enable()
        twist(net)

    def test_instances_made_of_the_class_are_plain(self, net):
        twist(net)
        assert type(net[1:]) is nn.Sequential
        assert type(type(net)()) is nn.Sequential


class TestRefused:
    def test_what_is_no_module(self):
        with pytest.raises(TypeError, match=r"`twist` takes a torch\.nn\.Module; got list"):
            twist([nn.Linear(1, 1)])

    @pytest.mark.parametrize("again", [twist, turn])
    def test_a_module_that_has_a_form(self, net, again):
        twist(net)
        with pytest.raises(RuntimeError, match="the Sequential is managed by `twist` already"):
            again(net)
        assert twist.state(net) is not None

    @pytest.mark.parametrize("again", [twist, turn])
    def test_a_parent_of_one(self, net, again):
        twist(net[1])
        with pytest.raises(RuntimeError, match="its child '1' is managed by `twist` already"):
            again(net)
        assert type(net) is nn.Sequential

    @pytest.mark.parametrize("again", [twist, turn])
    def test_a_child_of_one(self, net, again):
        twist(net)
        with pytest.raises(RuntimeError, match=r"the module is '1\.0' in a Sequential .* managed by `twist` already"):
            again(net[1][0])
        assert type(net[1][0]) is nn.Linear

    def test_a_parameter_that_another_managed_module_has(self, net):
        twist(net)
        other = nn.Sequential(nn.Linear(2, 1))
        other[0].weight = net[1][0].weight
        with pytest.raises(RuntimeError, match=r"'0\.weight' is shared.*'1\.0\.weight' of a Sequential .* by `twist`"):
            turn(other)
        assert type(other) is nn.Sequential
        assert KEY not in vars(other)

    def test_but_not_one_that_is_ignored_on_either_side(self, net):
        weight = net[1][0].weight
        others = [nn.Sequential(nn.Linear(2, 1)) for _ in range(3)]
        for other in others:
            other[0].weight = weight
        twist(others[0], ignored=[weight])
        twist(net)
        twist(others[1], ignored=[weight])
        with pytest.raises(RuntimeError, match="shared"):
            twist(others[2])

    def test_one_that_is_shared_after_the_other_module_is_gone(self, net):
        twist(nn.Sequential(net[0]))
        gc.collect()
        twist(net)

    def test_a_form_under_which_names_change(self, net):
        with pytest.raises(RuntimeError, match=r"`rename` would change parameter names.*'0\.weight'"):
            rename(net)
        assert type(net) is nn.Sequential
        assert KEY not in vars(net)
        twist(net)

    def test_what_the_function_refuses_stays_as_it_was(self):
        class Unfit(nn.Linear):
            pass

        unfit = Unfit(1, 1)
        with pytest.raises(ValueError, match="unfit"):
            twist(unfit)
        assert type(unfit) is Unfit
        assert KEY not in vars(unfit)

    def test_a_class_that_cannot_be_changed(self):
        class Fixed(nn.Linear):
            def __init_subclass__(cls):
                raise TypeError("final")

        fixed = Fixed(1, 1)
        with pytest.raises(TypeError, match="final"):
            twist(fixed)
        assert KEY not in vars(fixed)

    def test_a_replica_by_a_wrapper(self, net):
        twist(net)
        with pytest.raises(RuntimeError, match=r"^cannot replicate the Sequential: it is managed by `twist` already"):
            net._replicate_for_data_parallel()

    @pytest.mark.parametrize(("path", "what"), [("", "the Sequential"), ("a.0", "'a.0', a Sequential")])
    def test_a_plan_of_a_tree_that_holds_it(self, net, path, what):
        twist(net)
        tree = nn.ModuleDict({"a": nn.ModuleList([net])}) if path else net
        with pytest.raises(RuntimeError, match=f"^cannot replicate {what}: it is managed by `twist` already"):
            ModulePlan.of(tree)


def test_metaclasses_and_init_subclass_are_called_as_python_does():
    class Meta(type):
        pass

    class Net(nn.Linear, metaclass=Meta):
        below: list = []  # noqa: RUF012

        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            Net.below.append(cls.__name__)

    net = twist(Net(1, 1))
    assert type(type(net)) is Meta
    assert Net.below == ["TwistNet"]
    torch.testing.assert_close(net(torch.ones(1, 1)), nn.Linear.forward(net, torch.ones(1, 1)))
