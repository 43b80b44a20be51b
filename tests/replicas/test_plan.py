"""Trees that cannot be replicated are refused by name, before anything changes. See test_replicate for the others."""

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel import replicate
from dataparallel.replicas.plan import REFUSAL, ModulePlan

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


def a_dead_proxy() -> Any:
    owner = nn.Identity()
    return weakref.proxy(owner)


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
        [a_dead_proxy()],
    ],
    ids=["array", "arrays", "MagicMock", "Mock of a list", "Mock of a module", "list without truth", "dead proxy"],
)
def test_odd_attributes_do_not_break_planning(odd: Any) -> None:
    module = Holder(lambda module: odd)
    assert not ModulePlan.of(module).entries[0].references
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
    with pytest.raises(ValueError, match=f"{theirs}: {name} is not initialised yet; run the module once"):
        replicate(module, ["cpu", "cpu"])
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


def scripted_around_python() -> nn.Module:
    """Script all the way down is fine: tests/test_scripted."""
    module = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
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


def test_a_refusal_leaves_the_tree_alone() -> None:
    tree = nn.Sequential(nn.Linear(2, 2), Holder(lambda module: eager(module.layer)))
    before = [dict(vars(module)) for module in tree.modules()]
    with pytest.raises(RuntimeError, match="compiled"):
        replicate(tree, ["cpu", "cpu"])
    assert [dict(vars(module)) for module in tree.modules()] == before
    assert gc.isenabled()


def test_a_tensor_that_stands_for_others_shares_no_memory() -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    plan = ModulePlan.of(layer)
    assert plan.tensors[0] is layer.weight
    assert plan.read_directly == set()
