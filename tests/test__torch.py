"""Private names of torch: all of them are in one room, torch has them, and without them there is a sentence."""

import ast
import contextvars
import importlib.util
import pkgutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import _torch
from dataparallel.replicas.compiled import torch_compile
from processes import run_script

pytestmark = pytest.mark.devices("cpu")  # it is about torch alone: once is enough

PACKAGE = Path(_torch.__file__).parent
PATHS = [name.path for name in _torch.NAMES]

INSTEAD = "torch._subclasses.UnsupportedFakeTensorException"  # a base class, for which another one stands in

NAMEDTUPLE = {"_fields", "_make", "_replace", "_asdict"}
PUBLISHED = {
    # What torch asks of classes that stand for its own, by these names.
    "_is_param",
    "_is_replica",
    "_replicate_for_data_parallel",
    # What every module has, and torch's own subclasses of Module read and write.
    *_torch.REGISTRIES,
    *_torch.HOOK_TABLES,
    "_non_persistent_buffers_set",
    "_compiled_call_impl",
    "_call_impl",
}


def without(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The room as it is imported beside a torch that lacks one name."""
    resolve = pkgutil.resolve_name

    def resolve_all_others(name: str) -> Any:
        if name == path:
            raise AttributeError(f"no {name}")
        return resolve(name)

    spec = importlib.util.spec_from_file_location("torch_without_a_name", _torch.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", resolve_all_others)
        patch.setitem(__import__("sys").modules, spec.name, module)  # dataclasses look it up there
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", PATHS)
def test_torch_has_it(path: str) -> None:
    pkgutil.resolve_name(path)


def test_each_is_named_once_and_has_a_purpose() -> None:
    assert len({*PATHS}) == len(PATHS)
    assert all(name.purpose for name in _torch.NAMES)


@pytest.mark.parametrize("name", [name for name in _torch.NAMES if name.path != INSTEAD], ids=lambda name: name.path)
def test_without_it_what_needs_it_raises_a_sentence(name: _torch.PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    room = without(name.path, monkeypatch)
    missing = next(found for found in room.NAMES if found.path == name.path)
    with pytest.raises(RuntimeError) as raised:
        missing.value(torch.empty(0))
    for words in (torch.__version__, name.path, name.purpose, "install"):
        assert words in str(raised.value)
    assert len([other for other in room.NAMES if other.value is not missing.value]) == len(PATHS) - 1


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("torch._C.DispatchKey", lambda room: room.without_view_tracking()),
        ("torch.utils._pytree", lambda room: room.pytree.SUPPORTED_NODES),
        ("torch.Tensor._version", lambda room: room.version_of(torch.ones(1))),
        ("torch._C._functorch.peek_interpreter_stack", lambda room: room.is_inside_functorch_transform()),
    ],
)
def test_what_is_made_of_it_raises_the_sentence_too(path: str, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room = without(path, monkeypatch)
    with pytest.raises(RuntimeError, match=f"has no {path}, which dataparallel needs to "):
        use(room)


def test_modules_have_the_attributes_by_which_their_parts_are_found() -> None:
    own = vars(nn.Module())
    assert {*_torch.REGISTRIES, *_torch.HOOK_TABLES, "_non_persistent_buffers_set"} <= {*own}
    module = nn.Module()
    module.register_forward_hook(print, with_kwargs=True, always_call=True)
    module.register_forward_pre_hook(print, with_kwargs=True)
    module.register_full_backward_hook(print)
    module.register_full_backward_pre_hook(print)
    written = {name for name, value in vars(module).items() if "hook" in name and isinstance(value, dict) and value}
    assert written == {*_torch.HOOK_TABLES}


def test_a_hook_knows_whether_the_engine_returns_or_accumulates_the_gradient_of_its_leaf() -> None:
    leaf, found = torch.ones(2, requires_grad=True), []
    leaf.register_hook(lambda gradient: found.append(_torch.is_returned(_torch.current_node())))
    torch.autograd.grad(leaf.sum(), leaf)
    leaf.sum().backward()
    leaf.sum().backward(inputs=[leaf])
    leaf.backward(torch.ones(2))
    assert found == [True, False, False, False]


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Attributes of other objects than ``self`` that begin with one underscore, and such imports from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for part in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                if is_private(part):
                    yield node.lineno, part


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(trees: list[ast.AST]) -> set[str]:
    """Private names that the library itself defines: functions, classes, attributes and variables."""
    own: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            elif isinstance(node, ast.alias):
                own.add((node.asname or node.name).rpartition(".")[2])
    return own


def test_no_other_room_spells_a_private_name_of_torch() -> None:
    files = [
        path
        for path in PACKAGE.rglob("*.py")
        if "testing" not in path.parts and path.name not in ("_torch.py", "torch_compile.py")
    ]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    assert len(trees) > 40
    # What the room has is asked of the room, also where the library has an attribute of that name.
    own = own_names([*trees.values()]) - {path.rpartition(".")[2] for path in PATHS}
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in private_names(tree)
        if name not in own and name not in PUBLISHED | NAMEDTUPLE
    ]
    assert found == []


COMPILED = """
import sys

import torch
from torch import nn

from dataparallel import DataParallel, _torch

class Compiles(nn.Linear):
    def forward(self, x):
        if sys.argv[1] == "inside":
            torch.compile(lambda x: x + 1, backend="eager")(x)
        return super().forward(x)


call = DataParallel(Compiles(2, 2), ["cpu", "cpu"])
x = torch.ones(4, 2)
if sys.argv[1] == "before":
    torch.compile(lambda x: x + 1, backend="eager")(x)
call(x)
torch._dynamo.reset()
print(_torch.note_whether_compiler_is_in_use())
"""


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "inside"])
def test_the_compiler_stays_in_use_when_torch_forgets_what_was_compiled(when: str) -> None:
    """A call has seen it. Functions that were compiled before stay compiled."""
    assert run_script(COMPILED, when).split() == ["True"]


def test_backwards_of_several_threads_are_in_one_context_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.autograd.graph
    if not hasattr(graph, "contextvars"):
        pytest.skip("this torch takes no context to the engine's threads")
    monkeypatch.setattr(graph, "contextvars", contextvars)  # as in a process where nothing was compiled
    torch_compile.let_backwards_run_at_once()
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(1)
    context = graph.contextvars.copy_context()
    barrier = threading.Barrier(2, timeout=10)

    def read() -> int:
        barrier.wait()
        return variable.get()

    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(context.run, read) for _ in range(2)]
        assert [one.result() for one in found] == [1, 1]
    replaced = graph.contextvars
    torch_compile.let_backwards_run_at_once()
    assert graph.contextvars is replaced
