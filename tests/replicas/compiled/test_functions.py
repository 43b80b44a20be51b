"""The functions that compiled replicas call: who shares them, and what cannot be compiled for replicas."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel.replicas.compiled.calls import CompiledCall, compiled_here

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough


def functions(module: nn.Module, others: Any = ()) -> Any:
    found = compiled_here(module, others)
    assert found is not None
    return found.functions


def linear(size: int = 2, **options: Any) -> nn.Module:
    module = nn.Linear(size, size)
    module.compile(**{"backend": "eager", **options})
    return module


def test_a_module_has_the_same_functions_at_each_plan() -> None:
    module = linear()
    assert functions(module) is functions(module)


def test_modules_of_a_tree_that_are_alike_share_them() -> None:
    other = compiled_here(linear())
    first = other.functions
    assert functions(linear(), [None, other]) is first
    assert functions(linear()) is not first  # of another tree
    assert functions(linear(3), [other]) is not first
    assert functions(linear(dynamic=True), [other]) is not first
    assert functions(linear(backend="aot_eager"), [other]) is not first
    assert functions(linear(fullgraph=True), [other]) is not first
    assert functions(torch.compile(nn.Linear(2, 2), backend="eager"), [other]) is not first


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused(mode: str) -> None:
    made = functions(linear(backend="inductor", mode=mode))
    with pytest.raises(RuntimeError, match="replicas cannot be compiled with CUDA graphs"):
        made.run(torch.device("cuda", 0), nn.Linear(2, 2), (torch.ones(1, 2),), {})


def test_a_call_does_not_keep_its_module_alive_and_is_seen_by_those_who_count() -> None:
    source, module = linear(), nn.Linear(2, 2)  # the source lives on, and its functions with it
    before = weakref.getweakrefcount(module)  # torch notes modules that are made once it has compiled
    call = CompiledCall(functions(source), module)
    assert weakref.getweakrefcount(module) == before + 1
    plain = weakref.ref(module)
    assert weakref.getweakrefcount(module) == before + 2
    torch.testing.assert_close(call(torch.ones(1, 2)), module.forward(torch.ones(1, 2)))
    del module
    assert plain() is None
    torch._dynamo.reset()
