"""A compiled program that calls replicas: one graph before the call and one after it, and the same numbers.

The replicas themselves are not compiled by what is around them.
"""

from pathlib import Path

import pytest
import torch

import dataparallel
from around import (
    Between,
    assert_same_parameters,
    batches,
    between,
    compiled_files,
    forget_what_was_compiled,
    graph_breaks,
    inner,
    number_of_graphs,
)
from dataparallel import DataParallel
from dataparallel.composable import replicate
from processes import run_script

PACKAGE = str(Path(dataparallel.__file__).parent)

# An epoch of four batches, the last of which is smaller, several times.
EPOCHS = [6, 6, 6, 5] * 3

pytestmark = pytest.mark.few(1)  # a case is compiled for seconds

BACKENDS = ["eager", pytest.param("aot_eager", marks=pytest.mark.long)]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    forget_what_was_compiled()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model(form, slots, root):
    made = between(root)
    made.inner = form(made.inner, slots)
    return made


@pytest.fixture
def reference(root):
    return between(root)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(call, optimizer, x):
    optimizer.zero_grad()
    loss = call(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_of(model, optimizer):
    return lambda x: train(model, optimizer, x)


class TestModule:
    """``torch.compile`` of a module that holds a wrapper."""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.slots(3, long=[2])
    def test_training_equals_one_device_and_nothing_is_compiled_again(self, model, reference, root, backend):
        compiled, ours, theirs = torch.compile(model, backend=backend), adamw(model), adamw(reference)
        graphs = []
        for x in batches(root, EPOCHS):
            torch.testing.assert_close(train(compiled, ours, x), train(reference, theirs, x), atol=1e-9, rtol=0)
            graphs.append(number_of_graphs())
        assert_same_parameters(model, reference)
        # One graph before the wrapper and one after it, and both once more when the batch first has another size.
        assert graphs == [2, 2, 2] + [4] * 9
        assert sum(graph_breaks().values()) == 2

    def test_fullgraph_is_refused_with_a_sentence(self, model, root):
        (x,) = batches(root, [6])
        with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
            torch.compile(model, backend="eager", fullgraph=True)(x)

    def test_many_models_are_no_reason_to_compile_again(self, form, slots, root):
        """Functions of the library would be compiled for each, until the compiler gives up."""
        (x,) = batches(root, [6])
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for number in range(10):
                module = form(inner().double().to(root), slots)

                def forward(x, module=module):
                    return module(x + 1)

                forward.__code__ = forward.__code__.replace(co_name=f"forward_{number}")  # with graphs of its own
                torch.testing.assert_close(torch.compile(forward, backend="eager")(x), module(x + 1))
        assert not [file for file in compiled_files() if file.startswith(PACKAGE)]


class TestWrapper:
    """``torch.compile`` of the wrapper itself: there is nothing around the call, so nothing is compiled."""

    @pytest.mark.slots(3, long=[2])
    def test_it_trains(self, form, slots, root):
        reference = inner().double().to(root)
        source = inner().double().to(root)
        source.load_state_dict(reference.state_dict())
        model = form(source, slots)
        compiled, ours, theirs = torch.compile(model, backend="eager"), adamw(model), adamw(reference)
        for x in batches(root, EPOCHS[:8]):
            torch.testing.assert_close(train(compiled, ours, x), train(reference, theirs, x), atol=1e-9, rtol=0)
        assert_same_parameters(model, reference)
        assert number_of_graphs() == 0
        assert graph_breaks() == {}

    def test_without_devices_the_module_is_compiled(self, root, monkeypatch):
        monkeypatch.setattr("dataparallel.devices.all_devices", list)
        (x,) = batches(root, [6])
        for wrapped in (DataParallel(inner().double().to(root)), replicate(inner().double().to(root))):
            forget_what_was_compiled()
            expected = wrapped(x)
            torch.testing.assert_close(torch.compile(wrapped, backend="eager")(x), expected)
            assert number_of_graphs() == 1
            assert graph_breaks() == {}


class TestTrainingStep:
    """A compiled function with the forward, the loss, the backward and the optimizer's step."""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.slots(3, long=[2])
    def test_it_equals_one_device_and_nothing_is_compiled_again(self, model, reference, root, backend):
        ours, theirs = step_of(model, sgd(model)), step_of(reference, sgd(reference))
        compiled = torch.compile(ours, backend=backend)
        graphs = []
        for x in batches(root, EPOCHS):
            torch.testing.assert_close(compiled(x), theirs(x), atol=1e-9, rtol=0)
            graphs.append(number_of_graphs())
        assert_same_parameters(model, reference)
        assert len({*graphs[4:]}) == 1
        assert graphs[-1] <= 9
        assert not [file for file in compiled_files() if file.startswith(PACKAGE)], "the library is not compiled"


def test_the_stages_called_by_themselves(slots, root):
    module = inner().double().to(root)

    def forward(x):
        chunks = dataparallel.scatter(x * 2, slots)
        replicas = dataparallel.replicate(module, slots)
        outputs = dataparallel.parallel_apply(replicas, [(chunk,) for chunk in chunks], devices=slots)
        return dataparallel.gather(outputs, slots[0]) + 1

    compiled = torch.compile(forward, backend="eager")
    for x in batches(root, [6, 5, 6]):
        torch.testing.assert_close(compiled(x), module(x * 2) + 1)
    compiled(x).sum().backward()
    ours = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    (module(x * 2) + 1).sum().backward()
    torch.testing.assert_close(ours, [parameter.grad for parameter in module.parameters()])
    assert not [file for file in compiled_files() if file.startswith(PACKAGE)]


WITHOUT_THE_COMPILER = """
import sys

import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate

x = torch.ones(4, 2)
for model in (
    DataParallel(nn.Linear(2, 2), ["cpu", "cpu"]),
    replicate(nn.Linear(2, 2), devices=["cpu", "cpu"]),
    fully_shard(nn.Linear(2, 2), devices=["cpu", "cpu"]),
):
    model(x).sum().backward()
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.long
def test_a_program_that_compiles_nothing_loads_no_compiler():
    assert run_script(WITHOUT_THE_COMPILER).split() == ["False"]


def test_marks_outlive_what_was_compiled(slots, root):
    """``torch._dynamo.reset()`` forgets how functions are to be treated that it has compiled."""
    model, (x,) = Between(DataParallel(inner(), slots)).double().to(root), batches(root, [6])
    for _ in range(2):
        torch.compile(model, backend="eager")(x)
        forget_what_was_compiled()
    torch.compile(model, backend="eager")(x)
    assert not [file for file in compiled_files() if file.startswith(PACKAGE)]
