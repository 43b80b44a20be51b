"""A plan lists each module and tensor of a tree once, and says which trees cannot be replicated.

Tests that replicas follow the plan are in test_replicate.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel import replicate
from dataparallel.replicas.build import build_replica
from dataparallel.replicas.plan import NONE_POSITION, ORIGINAL_CLASS, REFUSAL, TWIN_INFO, ModulePlan, TwinInfo

pytestmark = [
    pytest.mark.devices("cpu"),  # it knows no slots: once is enough
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]


def eager(function: Any) -> Any:
    return torch.compile(function, backend="eager")


class Holder(nn.Module):
    """A child `layer`, and one more attribute that is in no registry."""

    def __init__(self, make: Callable[[nn.Module], Any] = lambda module: None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        vars(self)["held"] = make(self)


def test_each_module_and_tensor_is_there_once() -> None:
    layer = nn.Linear(2, 2)
    tree = nn.Sequential(layer, nn.Sequential(layer, nn.BatchNorm1d(2)))
    tree.tied = layer.weight
    tree.register_buffer("again", tree[1][1].running_mean)
    plan = ModulePlan.of(tree)
    assert [entry.name for entry in plan.entries] == ["", "0", "1", "1.1"]
    assert len(plan.tensors) == len({id(t) for t in plan.tensors}) == 7
    assert plan.parameters == [0, 1, 2, 3]
    root, first, nested, norm = plan.entries
    assert root.parameters["tied"] == first.parameters["weight"]
    assert root.buffers["again"] == norm.buffers["running_mean"]
    assert root.children["0"] == nested.children["0"] == 1


def test_what_is_none_stays_none() -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer.register_buffer("nothing", None)
    layer.register_module("nobody", None)
    (entry,) = ModulePlan.of(layer).entries
    assert (entry.parameters["bias"], entry.buffers["nothing"], entry.children["nobody"]) == (NONE_POSITION,) * 3


def test_a_tensor_that_is_parameter_and_buffer_is_a_parameter() -> None:
    tree = nn.Sequential(nn.Module(), nn.Linear(2, 2, bias=False))
    tree[0].register_buffer("view", tree[1].weight.detach())
    tree[0]._buffers["same"] = tree[1].weight
    plan = ModulePlan.of(tree)
    assert (len(plan.tensors), plan.parameters) == (2, [0])


@pytest.mark.parametrize(
    ("make", "found", "cyclic"),
    [
        (lambda module: None, False, False),
        (lambda module: [1, "text", torch.zeros(2)], False, False),
        (lambda module: [module.layer.weight], True, False),
        (lambda module: module.layer.weight, True, False),
        (lambda module: module.layer, True, True),
        (lambda module: [module], True, True),
        (lambda module: module.layer.forward, True, True),
        (lambda module: lambda: module, True, True),
        (lambda module: nn.Linear(1, 1), False, False),
    ],
)
def test_references_are_found_once_per_plan(make: Callable, found: bool, cyclic: bool) -> None:
    plan = ModulePlan.of(Holder(make))
    assert plan.entries[0].references == (["held"] if found else [])
    assert (plan.cycles is not None) == cyclic


def test_hooks_over_the_tree_are_references() -> None:
    module = Holder()
    module.layer.register_forward_hook(lambda layer, args, output: module.layer(output))
    assert ModulePlan.of(module).entries[1].references == ["_forward_hooks"]


def test_recurrent_weight_lists_are_references_that_make_no_circle() -> None:
    plan = ModulePlan.of(nn.LSTM(2, 2))
    assert "_flat_weights" in plan.entries[0].references
    assert plan.cycles is None
    assert plan.entries[0].has_own_rule


class TruthlessList(list):
    def __bool__(self) -> bool:
        raise AssertionError("asked for its truth")


@pytest.mark.parametrize(
    "odd",
    [
        np.zeros((2, 2)),
        [np.zeros((2, 2))],
        mock.MagicMock(),
        mock.Mock(spec=list),
        mock.Mock(spec=nn.Module),
        TruthlessList([1]),
    ],
    ids=["array", "arrays", "MagicMock", "Mock of a list", "Mock of a module", "list without truth"],
)
def test_odd_attributes_do_not_break_planning(odd: Any) -> None:
    module = Holder(lambda module: odd)
    assert ModulePlan.of(module).entries[0].references == []
    assert [replica.held is odd for replica in replicate(module, ["cpu", "cpu"])] == [True, True]


def a_compiled_forward() -> nn.Module:
    tree = nn.Sequential(nn.Linear(2, 2))
    tree[0].forward = eager(tree[0].forward)
    return tree


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (a_compiled_forward, r"'0\.forward'"),
        (lambda: Holder(lambda module: eager(module.layer.forward)), "'held'"),
        (lambda: Holder(lambda module: [eager(module.layer.forward)]), "'held'"),
        (lambda: Holder(lambda module: eager(lambda x: module.layer(x))), "'held'"),
        (lambda: Holder(lambda module: eager(module.layer)), "'held'"),
        (lambda: Holder(lambda module: {"fast": eager(module.layer)}), "'held'"),
        (lambda: Holder(eager), "'held'"),
    ],
    ids=[
        "forward",
        "method",
        "method in a list",
        "closure",
        "child in an attribute",
        "child in a dict",
        "itself in an attribute",
    ],
)
def test_compiled_code_in_an_attribute_is_refused_by_name(build: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(RuntimeError, match=f"cannot replicate {name}: it was compiled with torch.compile"):
        replicate(build(), ["cpu", "cpu"])


def test_the_plan_knows_which_modules_are_compiled() -> None:
    tree = nn.Sequential(nn.Linear(2, 2), eager(nn.Linear(2, 2)), nn.Linear(2, 2))
    tree[2].compile(backend="eager")
    plan = ModulePlan.of(tree)
    compiled = {entry.name: entry.compiled for entry in plan.entries if entry.compiled is not None}
    assert {name: (how.attribute, how.child) for name, how in compiled.items()} == {
        "1": ("forward", "_orig_mod"),
        "2": ("_compiled_call_impl", None),
    }
    assert plan.compiled
    assert plan.is_plain
    assert not ModulePlan.of(nn.Linear(2, 2)).compiled


def test_what_torch_does_not_say_how_it_was_compiled_is_refused_by_name() -> None:
    tree = nn.Sequential(nn.Linear(2, 2))
    tree[0]._compiled_call_impl = tree[0]._call_impl
    with pytest.raises(RuntimeError, match="cannot replicate '0': it was compiled, and torch does not say how"):
        replicate(tree, ["cpu", "cpu"])


def test_a_compiled_function_that_knows_nothing_of_the_tree_is_welcome() -> None:
    module = Holder(lambda module: eager(torch.sin))
    assert all(replica.held is module.held for replica in replicate(module, ["cpu", "cpu"]))


def test_code_kept_out_of_the_compiler_is_not_compiled() -> None:
    module = Holder(lambda module: torch.compiler.disable(module.layer.forward))
    assert len(replicate(module, ["cpu", "cpu"])) == 2


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: nn.LazyLinear(2), "weight"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), r"1\.weight"),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False)), r"0\.running_mean"),
    ],
)
def test_lazy_modules_are_refused_by_name(build: Callable[[], nn.Module], name: str) -> None:
    module = build()
    theirs = r"^Attempted to use an uninitialized parameter\. Modules with uninitialized parameters can't be replicated"
    with pytest.raises(RuntimeError, match=f"{theirs}: {name} is not initialised yet; run the module once") as refused:
        replicate(module, ["cpu", "cpu"])
    assert isinstance(refused.value, ValueError)  # as torch.nn.DataParallel raises
    module(torch.zeros(3, 2))
    assert len(replicate(module, ["cpu", "cpu"])) == 2


def test_a_class_may_say_that_there_can_be_no_replicas() -> None:
    class Single(nn.Linear):
        def _dataparallel_refusal(self, path: str) -> str:
            return f"there is one {self.in_features} wide at {path!r}"

    assert hasattr(Single, REFUSAL)
    for tree, path in ((nn.ModuleDict({"a": nn.Sequential(nn.Tanh(), Single(3, 2))}), "a.1"), (Single(3, 2), "")):
        with pytest.raises(RuntimeError, match=f"^there is one 3 wide at '{path}'$"):
            replicate(tree, ["cpu", "cpu"])


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))


def scripted_around_python() -> nn.Module:
    module = scripted()
    # TorchScript converts or refuses what is assigned; its table of Python modules does neither.
    module._modules._python_modules["helper"] = nn.Linear(2, 2)
    return module


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (scripted_around_python, "the ScriptModule 'at the root'"),
        (lambda: nn.Sequential(nn.Tanh(), scripted_around_python()), "the ScriptModule '1'"),
    ],
)
def test_a_script_module_that_holds_a_python_module_is_refused(build: Callable, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"cannot replicate {name}: .*Python module 'helper' \(Linear\)"):
        replicate(build(), ["cpu", "cpu"])


@pytest.mark.parametrize(
    "build",
    [
        scripted,
        lambda: torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)),
        lambda: nn.Sequential(scripted(), nn.Linear(2, 2)),
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))),
    ],
    ids=["scripted", "traced", "scripted child", "traced child"],
)
def test_script_all_the_way_down_is_fine(build: Callable[[], nn.Module]) -> None:
    assert [replica(torch.zeros(1, 2)).shape for replica in replicate(build(), ["cpu", "cpu"])] == [(1, 2)] * 2


def test_a_refusal_leaves_the_tree_alone() -> None:
    tree = nn.Sequential(nn.Linear(2, 2), Holder(lambda module: eager(module.layer)))
    before = [dict(vars(module)) for module in tree.modules()]
    with pytest.raises(RuntimeError, match="compiled"):
        replicate(tree, ["cpu", "cpu"])
    assert [dict(vars(module)) for module in tree.modules()] == before


class TestATwinOfAnotherModule:
    def test_what_refers_to_that_module_refers_into_the_tree(self) -> None:
        source, root = nn.Sequential(nn.Linear(2, 2)), nn.Sequential()
        source[0].above = [source]
        root.append(source[0])
        assert ModulePlan.of(root).is_plain
        vars(root)[TWIN_INFO] = TwinInfo(id(source))
        plan = ModulePlan.of(root)
        assert plan.entries[1].references == ["above"]
        assert plan.source_id == id(source)

    def test_what_is_ignored_is_no_part_of_it(self) -> None:
        root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
        root[0].weight = root[2].weight
        root[0].again = [root[1], root[2].weight]
        ignored = frozenset({root[1]}), frozenset({id(root[2].weight)})
        vars(root)[TWIN_INFO] = TwinInfo(id(root), *ignored)
        plan = ModulePlan.of(root)
        assert [entry.name for entry in plan.entries] == ["", "0", "2"]
        assert list(map(id, plan.tensors)) == [id(root[0].bias), id(root[2].bias)]
        held = [*plan.shared, None]
        assert held[plan.entries[0].children["1"]] is root[1]
        assert all(held[plan.entries[i].parameters["weight"]] is root[2].weight for i in (1, 2))
        assert not plan.has_references
        assert plan.is_plain


class Managed:
    """The first base of classes that a form made. It refuses what others do with its modules."""

    def _dataparallel_refusal(self, path: str) -> str:
        return f"cannot replicate {path!r}"

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError("cannot replicate")


def managed(module: nn.Module) -> nn.Module:
    cls = type(module)
    module.__class__ = type(cls.__name__, (Managed, cls), {ORIGINAL_CLASS: cls})
    return module


class TestModulesOfAForm:
    """A form's modules are in the replicas that this form makes, and in no others."""

    def twin(self, allowed: type | None) -> nn.Module:
        root = nn.Sequential(nn.Linear(2, 2), managed(nn.Linear(2, 2)))
        vars(root)[TWIN_INFO] = TwinInfo(id(root), allowed=allowed)
        return root

    @pytest.mark.parametrize("allowed", [None, nn.LSTM])
    def test_are_refused_elsewhere(self, allowed: type | None) -> None:
        with pytest.raises(RuntimeError, match=r"^cannot replicate '1'"):
            ModulePlan.of(self.twin(allowed))

    def test_keep_their_class(self) -> None:
        root = self.twin(Managed)
        plan = ModulePlan.of(root)
        assert plan.is_plain
        replica = build_replica(plan, [torch.ones_like(tensor) for tensor in plan.tensors], False)
        assert type(replica[1]) is type(root[1])
        assert replica[1](torch.ones(1, 2)).tolist() == [[3, 3]]

    def test_follow_the_rule_of_their_original_class(self) -> None:
        root = nn.Sequential(managed(nn.LSTM(2, 2)))
        vars(root)[TWIN_INFO] = TwinInfo(id(root), allowed=Managed)
        plan = ModulePlan.of(root)
        assert plan.entries[1].has_own_rule
        tensors = [torch.ones_like(tensor) for tensor in plan.tensors]
        replica = build_replica(plan, tensors, False)
        assert type(replica[0]) is type(root[0])
        assert [id(weight) for weight in replica[0]._flat_weights] == [id(tensor) for tensor in tensors]
        assert replica[0]._flat_weights is not root[0]._flat_weights


def test_a_tensor_that_stands_for_others_shares_no_memory() -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    plan = ModulePlan.of(layer)
    assert plan.tensors[0] is layer.weight
    assert plan.read_directly == set()
