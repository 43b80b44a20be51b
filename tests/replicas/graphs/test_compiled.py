"""Replicas that are compiled and captured: what the compiler makes is launched by graphs of the library.

The stand-in has no Triton, so replicas are compiled by backends that run torch's operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphed_models
from dataparallel.replicas.compiled import torch_compile
from dataparallel.replicas.compiled.calls import _say_that_they_run_without
from dataparallel.replicas.compiled.compile_lock import compile_lock
from dataparallel.replicas.graphs.calls import WARM_UP
from each_form import Form, by_wrapper, replicated, replicating_forms
from graphed_models import FORMS, MODELS
from graphed_nets import SETTLE, Net, build, captured, graphs_of, inputs, reasons, step

Way = Callable[..., Any]


def by_argument(form: Form, network: nn.Module, slots: list, backend: str = "aot_eager", **options: Any) -> Any:
    return form(network, slots, compile={"backend": backend}, **options)


def wrapped(form: Form, network: nn.Module, slots: list, backend: str = "aot_eager", **options: Any) -> Any:
    return form(torch.compile(network, backend=backend), slots, **options)


def in_place(form: Form, network: nn.Module, slots: list, backend: str = "aot_eager", **options: Any) -> Any:
    network.compile(backend=backend)
    return form(network, slots, **options)


def blocks(form: Form, network: Any, slots: list, backend: str = "aot_eager", **options: Any) -> Any:
    for block in network.blocks:
        block.compile(backend=backend)
    return form(network, slots, **options)


WAYS = [by_argument, wrapped, in_place, blocks]
SHORT = [(by_argument, by_wrapper), (in_place, by_wrapper), (wrapped, replicated), (blocks, replicated)]
each_way = pytest.mark.parametrize(
    ("way", "form"),
    [
        pytest.param(way, form, marks=[] if (way, form) in SHORT else pytest.mark.long)
        for way in WAYS
        for form in (by_wrapper, replicated)
    ],
    indirect=["form"],
)
with_graphs = pytest.mark.devices("cuda")
EAGER = {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> None:
    torch.compiler.reset()


def train(network: Any, root: torch.device) -> list[Tensor]:
    """Losses of training steps, and what evaluations between them give."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    found = []
    for _ in range(2 * SETTLE):
        x = inputs(root)
        found.append(step(network, x))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(network.eval()(x).sum())
        network.train()
    return found


@with_graphs
@each_way
@pytest.mark.parametrize("how", [{"graphs": True}, {"backend": "cudagraphs"}], ids=["by argument", "by its compiler"])
def test_trains_as_on_one_device(how: dict[str, Any], way: Way, form: Form, slots: list, root: torch.device) -> None:
    """Code that is compiled with CUDA graphs needs no argument of the form."""
    expected = train(form(build(root), slots), root)
    network = way(form, build(root), slots, **how)
    torch.testing.assert_close(train(network, root), expected, rtol=1e-9, atol=1e-9)
    assert captured(network) >= len({*slots}) * SETTLE  # of both kinds of calls
    assert reasons(network) == set()


@with_graphs
@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_models_of_all_kinds(model: str, form: str, slots: list) -> None:
    expected, _ = graphed_models.train(MODELS[model], FORMS[form], slots, 12)
    options: dict[str, Any] = {"graphs": True, "compile": EAGER}
    found, network = graphed_models.train(MODELS[model], FORMS[form], slots, 12, **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert bool(captured(network)) == (model != "lstm and gru"), reasons(network)


@with_graphs
def test_code_that_is_compiled_later_has_no_graphs_and_says_so(
    slots: list, root: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    module = build(root)
    network, x = by_wrapper(module, slots), inputs(root)
    expected = step(network, x)
    for block in [module, *module.blocks]:
        block.compile(backend="cudagraphs")
    _say_that_they_run_without.cache_clear()
    torch.testing.assert_close(step(network, x), expected, rtol=1e-9, atol=1e-9)
    assert graphs_of(network) is None
    assert [record.getMessage() for record in caplog.records if record.name == "dataparallel"] == [
        "replicas that were compiled with CUDA graphs run without: their form has none. DataParallel and replicate "
        "have graphs=True"
    ]


@with_graphs
@replicating_forms
def test_code_compiled_with_cuda_graphs_is_not_captured_if_the_user_says_so(
    form: Form, slots: list, root: torch.device
) -> None:
    expected = train(form(build(root), slots), root)
    network = by_argument(form, build(root), slots, backend="cudagraphs", graphs=False)
    torch.testing.assert_close(train(network, root), expected, rtol=1e-9, atol=1e-9)
    assert graphs_of(network) is None


def calling_compiled_code() -> nn.Module:
    class Calls(Net):
        last_step = staticmethod(torch.compile(lambda x: x.sin().cos().sin(), backend="aot_eager"))

        def forward(self, x: Tensor) -> Tensor:
            return self.last_step(super().forward(x))

    return Calls()


@with_graphs
@pytest.mark.parametrize(
    ("kind", "compile"), [(Net, None), (Net, {"backend": "aot_eager"}), (calling_compiled_code, None)]
)
def test_a_compiled_backward_runs_once(kind: Any, compile: Any, slots: list, root: torch.device) -> None:
    """Inductor's may write to what the forward has saved. torch refuses ``retain_graph`` for such code too."""
    network, x = by_wrapper(build(root, kind), slots, graphs=True, compile=compile), inputs(root)
    for _ in range(SETTLE):
        step(network, x)
    assert captured(network)
    network.zero_grad()
    loss = network(x).square().mean()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in network.parameters()]
    if kind is Net and compile is None:
        loss.backward()
        torch.testing.assert_close([p.grad for p in network.parameters()], [2 * grad for grad in first])
    else:
        with pytest.raises(RuntimeError, match="this backward is compiled and has run already"):
            loss.backward()


@with_graphs
def test_code_that_does_not_fit_in_the_capture_is_not_compiled_there(slots: list, root: torch.device) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: float) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(x, 2.0 if torch.cuda.is_current_stream_capturing() else 1.0)

    module: Any = build(root, Around)
    module.scaled.compile(backend="aot_eager", dynamic=False)
    network, x = by_wrapper(module, slots, graphs=True), inputs(root)
    with torch.no_grad():
        expected = network(x)
        for _ in range(WARM_UP):
            torch.testing.assert_close(network(x), expected)
    assert not captured(network)
    assert any("none of its compiled code fits" in reason for reason in reasons(network))


@pytest.mark.devices("cpu")
def test_code_without_the_compilers_graphs_is_compiled_as_the_user_says() -> None:
    seen = []

    def keep(guards: Any) -> list[bool]:
        seen.extend(guards)
        return [True for _ in guards]

    limit = {"recompile_limit": 3} if "recompile_limit" in signature(torch.compile).parameters else {}
    how: dict[str, Any] = {"options": {"guard_filter_fn": keep}, "fullgraph": True, **limit}
    made = torch_compile.compiler_context(torch.compile(nn.Linear(2, 2), backend="cudagraphs", **how))
    found = torch_compile.without_cuda_graphs(made)
    assert found.fullgraph
    assert [getattr(each, "_recompile_limit", None) for each in torch_compile._callbacks(found.callback)] == [
        getattr(each, "_recompile_limit", None) for each in torch_compile._callbacks(made.callback)
    ]
    found(nn.Linear(2, 2))(torch.ones(1, 2))
    assert seen


@with_graphs
def test_a_capture_begins_when_nobody_compiles(slots: list, root: torch.device) -> None:
    network, x = by_wrapper(build(root), slots[:1], graphs=True), inputs(root)

    @torch.no_grad()
    def call() -> None:
        network(x)

    compiles, is_done = threading.Event(), threading.Event()

    def compile() -> None:
        compiles.set()
        assert is_done.wait(60)

    with ThreadPoolExecutor(1) as calls, ThreadPoolExecutor(1) as compilations:
        for _ in range(WARM_UP):
            calls.submit(call).result()
        compiling = compilations.submit(compile_lock.run_alone, compile)
        assert compiles.wait(60)
        calling = calls.submit(call)
        try:
            with pytest.raises(TimeoutError):  # it waits
                calling.result(0.5)
        finally:
            is_done.set()
        compiling.result()
        calling.result()
    assert captured(network)
