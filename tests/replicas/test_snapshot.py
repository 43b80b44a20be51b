"""A snapshot holds as long as a new plan would be the same as the one it was made from."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.replicas.plan import ModulePlan
from dataparallel.replicas.stamp import PlanStamp

pytestmark = pytest.mark.devices("cpu")  # it knows no slots: once is enough


class Tree(nn.Module):
    """A child, a parameter, buffers of both kinds, a registered ``None``, and attributes that can be filled."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.register_parameter("bias", None)
        self.width = 2
        self.shape = (2, 2)
        self.items: list[Any] = []
        self.table: dict[str, Any] = {}
        self.ordered: OrderedDict[str, Any] = OrderedDict(a=1)
        self.partial = functools.partial(max, 1)

        def function() -> Any:
            return holder

        holder = None
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        run = self.items[0] if self.items else self.child
        return run(x) * self.weight * self.width


@pytest.fixture
def tree() -> Tree:
    return Tree()


def snapshot(tree: nn.Module) -> PlanStamp:
    plan = ModulePlan.of(tree)
    assert plan.is_plain
    return PlanStamp(plan)


def fill_cell(tree: Tree) -> None:
    tree.function.__closure__[0].cell_contents = tree.child


def persistent(tree: Tree) -> None:
    tree._non_persistent_buffers_set.clear()


def reorder(tree: Tree) -> None:
    first = tree.child._modules.pop("0")
    tree.child._modules["0"] = first


def rename(tree: Tree) -> None:
    """The key changes, the values stay."""
    tree.more = vars(tree).pop("width")


def another_class(tree: Tree) -> None:
    tree.child.__class__ = type("Other", (nn.Sequential,), {})


CHANGES: dict[str, Callable[[Tree], Any]] = {
    "another parameter": lambda tree: setattr(tree.child[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter more": lambda tree: tree.register_parameter("more", nn.Parameter(torch.ones(2))),
    "a parameter less": lambda tree: delattr(tree, "weight"),
    "a parameter where none was": lambda tree: setattr(tree, "bias", nn.Parameter(torch.ones(2))),
    "None for a parameter": lambda tree: setattr(tree.child[0], "bias", None),
    "a parameter where the registry was empty": lambda tree: tree.child[1].register_parameter("p", tree.weight),
    "a tie": lambda tree: setattr(tree, "bias", tree.weight),
    "another buffer": lambda tree: setattr(tree, "kept", torch.ones(2)),
    "a buffer more": lambda tree: tree.child[1].register_buffer("more", torch.ones(2)),
    "a persistent buffer": persistent,
    "a child more": lambda tree: tree.child.append(nn.Linear(2, 2)),
    "a child where there was none": lambda tree: tree.child[1].add_module("more", nn.ReLU()),
    "a child less": lambda tree: tree.child.__delitem__(1),
    "another child": lambda tree: tree.child.__setitem__(1, nn.ReLU()),
    "another order": reorder,
    "another class": another_class,
    "an attribute": lambda tree: setattr(tree, "width", 3),
    "an attribute's name": rename,
    "all attributes": lambda tree: setattr(tree, "__dict__", {**vars(tree), "width": 3}),
    "an attribute more": lambda tree: setattr(tree.child[1], "more", 1),
    "an attribute less": lambda tree: delattr(tree, "width"),
    "a method": lambda tree: setattr(tree.child[1], "forward", tree.child[0].forward),
    "eval": lambda tree: tree.child[1].eval(),
    "a forward hook": lambda tree: tree.child[1].register_forward_hook(print),
    "a forward pre-hook": lambda tree: tree.register_forward_pre_hook(print, with_kwargs=True),
    "a backward hook": lambda tree: tree.register_full_backward_hook(print),
    "a list comes to hold a child": lambda tree: tree.items.append(tree.child),
    "a list comes to hold a parameter": lambda tree: tree.items.append(tree.weight),
    "a list comes to hold a method": lambda tree: tree.items.append(tree.child[0].forward),
    "a list comes to hold what is compiled": lambda tree: tree.items.append(
        torch.compile(tree.child[0], backend="eager")
    ),
    "a table comes to hold the tree": lambda tree: tree.table.update(me=tree),
    "an ordered dict comes to hold a child": lambda tree: tree.ordered.update(a=tree.child),
    "a partial comes to hold a child": lambda tree: tree.partial.__setstate__((max, (tree.child,), {}, {})),
    "a cell comes to hold a child": fill_cell,
    "a function's attribute": lambda tree: setattr(tree.function, "owner", tree),
}


def test_does_not_hold_when_a_list_comes_to_hold_what_was_compiled_before(tree: Tree) -> None:
    compiled = torch.compile(tree.child[0], backend="eager")
    taken = snapshot(tree)
    tree.items.append(compiled)
    assert not taken.holds(tree)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_does_not_hold(change, tree: Tree) -> None:
    taken = snapshot(tree)
    change(tree)
    assert not taken.holds(tree)


def test_does_not_hold_when_an_object_in_the_place_of_a_method_comes_to_hold_a_child(tree: Tree) -> None:
    class Calls:
        run: Any = torch.relu

        def __call__(self, x: Tensor) -> Tensor:
            return self.run(x)

    tree.child[1].forward = calls = Calls()
    taken = snapshot(tree)
    assert taken.holds(tree)
    calls.run = tree.child[0]
    assert not taken.holds(tree)


def test_what_cannot_be_replicated_any_more_is_refused_at_the_next_forward(tree: Tree, slots: list, root) -> None:
    tree.to(root)
    wrapped = DataParallel(tree, slots)
    x = torch.ones(len(slots), 2, device=root)
    with torch.no_grad():
        wrapped(x)
        wrapped(x)
        tree.items.append(torch.compile(tree.child, backend="eager"))
        with pytest.raises(RuntimeError, match=r"cannot replicate .*items.* compiled"):
            wrapped(x)
        tree.items.clear()
        torch.testing.assert_close(wrapped(x), tree(x))
