"""What ``compile=`` takes and refuses; modules that are alike share the functions that their replicas call."""

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.replicas.compiled.calls import CompileArgument, CompiledCall, compiled_here

pytestmark = pytest.mark.devices("cpu")  # it knows no slots: once is enough

SLOTS = ["cpu", "cpu"]


@pytest.mark.parametrize("compile", [None, False])
def test_nothing_is_to_be_compiled(compile: Any) -> None:
    assert CompileArgument.checked(nn.Linear(2, 2), compile) is None


@pytest.mark.parametrize("wrong", ["inductor", 1, ["eager"]])
def test_it_is_a_truth_value_or_a_dict(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"compile is True, False or a dict of arguments for torch\.compile; got"):
        DataParallel(nn.Linear(2, 2), SLOTS, compile=wrong)


def test_names_in_the_dict_are_those_of_torch() -> None:
    with pytest.raises(TypeError, match="'backends' is none of backend, mode, dynamic, fullgraph, options"):
        DataParallel(nn.Linear(2, 2), SLOTS, compile={"backends": "eager"})


def test_torch_says_what_it_does_not_take() -> None:
    with pytest.raises(Exception, match="no_such_backend"):
        DataParallel(nn.Linear(2, 2), SLOTS, compile={"backend": "no_such_backend"})(torch.ones(2, 2))


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_module_needs_no_argument(how: str) -> None:
    module: nn.Module = nn.Linear(2, 2)
    if how == "in place":
        module.compile(backend="eager")
    else:
        module = torch.compile(module, backend="eager")
    with pytest.raises(ValueError, match="is compiled already, and its replicas are compiled in the same way"):
        DataParallel(module, SLOTS, compile=True)


def test_a_module_that_is_compiled_later_as_well_is_refused() -> None:
    module = nn.Linear(2, 2)
    wrapper = DataParallel(module, SLOTS, compile={"backend": "eager"})
    module.compile(backend="eager")
    with pytest.raises(RuntimeError, match="was compiled, and its wrapper has compile= as well"):
        wrapper(torch.ones(2, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_script_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.compile takes no ScriptModule"):
        DataParallel(torch.jit.script(nn.Linear(2, 2)), SLOTS, compile=True)


def test_freezing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    wrapper = DataParallel(nn.Linear(2, 2), SLOTS, compile={"backend": "eager"})
    with config.patch(freezing=True), pytest.raises(RuntimeError, match=r"freezing = True: graphs would hold"):
        wrapper(torch.ones(2, 2))
    wrapper(torch.ones(2, 2))


def test_a_copy_has_the_same_options() -> None:
    argument = CompileArgument({"backend": "eager", "dynamic": False})
    for duplicate in (copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))):
        assert duplicate(argument).options == argument.options


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


def test_a_call_does_not_keep_its_module_alive() -> None:
    source, module = linear(), nn.Linear(2, 2)  # the source lives on, and its functions with it
    call = CompiledCall(functions(source), module)
    torch.testing.assert_close(call(torch.ones(1, 2)), module.forward(torch.ones(1, 2)))
    alive = weakref.ref(module)
    del module
    assert alive() is None
    torch._dynamo.reset()
