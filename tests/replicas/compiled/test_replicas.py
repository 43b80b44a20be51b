"""Compiled replicas compute what replicas that are not compiled compute, from few graphs."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from at_once import in_threads
from compiled_nets import (
    BACKEND,
    WAYS,
    Breaks,
    assert_same,
    batch,
    build,
    compile_argument,
    expected_steps,
    state_and_gradients,
    steps,
)
from dataparallel import DataParallel
from dataparallel.compiled import FrameCounts
from dataparallel.replicas.compiled.compile_lock import compile_lock
from dataparallel.testing.parity import Perturbation, assert_same_step
from freed_later import first_call_is_shared

Way = Callable[..., DataParallel]
Since = Callable[[], FrameCounts]

pytestmark = pytest.mark.few(2)  # a case is compiled for a second


@pytest.mark.few(3)
@pytest.mark.slots(2, long=[3, 8])
def test_steps_equal_those_of_replicas_that_are_not_compiled(way: Way, slots: list, root: torch.device, since: Since):
    """With two batches more that are smaller, and evaluation between them."""
    size = 4 * len(slots)
    batches = [batch(root, count) for count in (size, size, size - len(slots), size, size - len(slots))]
    expected = expected_steps(slots, root, batches)
    net = build(root)
    wrapper = way(net, slots)
    assert_same(steps(wrapper, net, batches), expected)
    assert since().total > 0
    assert since().eager.total() == 0


def test_each_replica_computes_with_its_own_parameters(whole: Way, slots: list):
    def wrap(net: nn.Module, slots: list, dim: int) -> Any:
        return whole(net, slots)

    perturbation, samples = Perturbation(seed=1, scale=0.5), ((batch("cpu"),), {})
    assert_same_step(lambda: build("cpu").eval(), samples, slots, perturbation=perturbation, wrap=wrap)


@pytest.mark.few(1)
def test_one_compilation_for_each_device_and_mode(whole: Way, slots: list, root: torch.device, since: Since):
    net, x = build(root), batch(root, 4 * len(slots))
    wrapper = whole(net, slots)
    devices = {torch.device(slot) for slot in slots}
    for _ in range(3):
        wrapper(x).sum().backward()
    assert since().compilations == dict.fromkeys(devices, 1)
    net.eval()
    for _ in range(12):  # the number of permits is being chosen meanwhile
        with torch.no_grad():
            wrapper(x)
    assert since().compilations == dict.fromkeys(devices, 2)
    wrapper(x)  # evaluation with a graph
    assert since().compilations == dict.fromkeys(devices, 3)
    net.train()
    wrapper(x).sum().backward()
    assert since().compilations == dict.fromkeys(devices, 3)
    assert since().eager.total() == 0


def test_blocks_that_are_alike_share_their_graphs(slots: list, root: torch.device, since: Since):
    def blocks() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)), nn.Linear(4, 3))

    batches = [batch(root)] * 3
    expected = expected_steps(slots, root, batches, blocks)
    net = build(root, blocks)
    for block in net:
        block.compile(backend=BACKEND)
    assert_same(steps(DataParallel(net, slots), net, batches), expected)
    # One for the linear layer, and two for blocks: the input of the first one needs no gradient.
    assert since().compilations == dict.fromkeys({torch.device(slot) for slot in slots}, 3)


def test_wrappers_of_one_module_share_its_graphs(slots: list, root: torch.device, since: Since):
    net, x = build(root), batch(root)
    net.compile(backend=BACKEND)
    DataParallel(net, slots)(x)
    before = since().total
    DataParallel(net, slots)(x)
    assert since().total == before


@pytest.mark.few(1)
def test_what_is_between_two_graphs_runs(whole: Way, slots: list, root: torch.device, since: Since):
    batches = [batch(root), batch(root, 9), batch(root), batch(root, 9)]
    expected = expected_steps(slots, root, batches, Breaks)
    net = build(root, Breaks)
    wrapper = whole(net, slots)
    assert_same(steps(wrapper, net, batches), expected)
    before = since().total
    steps(wrapper, net, batches)
    assert since().total == before
    assert since().eager.total() == 0


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast_reaches_compiled_replicas(whole: Way, slots: list, root: torch.device, dtype: torch.dtype):
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def outputs(wrapper: nn.Module) -> list[Tensor]:
        x, found = batch(root).float(), []
        for enabled in (True, False, True):
            with torch.autocast(root.type, dtype=dtype, enabled=enabled):
                found.append(wrapper(x))
        return found

    expected = outputs(DataParallel(build(root, make).float(), slots))
    found = outputs(whole(build(root, make).float(), slots))
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert found[0].dtype == dtype
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x))


def test_dropout_draws_as_it_does_without_the_compiler(whole: Way, slots: list, root: torch.device):
    def outputs(wrapper: nn.Module) -> list[Tensor]:
        wrapper(batch(root))  # compiles
        torch.manual_seed(3)
        return [wrapper(batch(root)).detach() for _ in range(3)]

    expected = outputs(DataParallel(build(root, Drops), slots))
    assert_same(outputs(whole(build(root, Drops), slots)), expected)


@pytest.mark.slots(3)
def test_six_threads_call_at_once(slots: list, root: torch.device):
    """First calls included, of wrappers that are compiled in different ways."""
    expected = expected_steps(slots, root, [batch(root)])

    def work(index: int, barrier: object) -> None:
        net = nets[index]
        wrapper = ways[index % 3](net, slots)
        barrier.wait(60)
        loss = wrapper(batch(root)).square().sum()
        loss.backward()
        with torch.no_grad():
            wrapper(batch(root))
        found[index] = [p.grad for p in net.parameters()]

    ways, nets, found = WAYS, [build(root) for _ in range(6)], {}
    in_threads(6, work)
    gradients = expected[-len(found[0]) :]
    for index in range(6):
        assert_same(found[index], gradients)
    assert not compile_lock.is_taken


@first_call_is_shared
@pytest.mark.slots(2)
def test_threads_that_call_one_wrapper_compile_once(slots: list, root: torch.device, since: Since):
    net = build(root).eval()
    wrapper = compile_argument(net, slots)
    expected = net(batch(root)).detach()

    def work(index: int, barrier: object) -> None:
        barrier.wait(60)
        with torch.no_grad():
            torch.testing.assert_close(wrapper(batch(root)), expected)

    in_threads(6, work)
    assert since().compilations == dict.fromkeys({torch.device(slot) for slot in slots}, 1)


@pytest.mark.long
def test_torch_may_forget_what_was_compiled(way: Way, slots: list, root: torch.device):
    net = build(root)
    wrapper = way(net, slots)
    expected = expected_steps(slots, root, [batch(root)] * 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(4):
        torch._dynamo.reset()
        optimizer.zero_grad()
        wrapper(batch(root)).square().sum().backward()
        optimizer.step()
    assert_same(state_and_gradients(net), expected[4:])


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor, wrong: bool = False) -> Tensor:
        y = self.layer(x)
        if wrong:
            torch._dynamo.graph_break()
            raise ZeroDivisionError("in forward")
        return y


@pytest.mark.long
def test_errors_in_compiled_code_are_raised_and_the_next_call_works(whole: Way, slots: list, root: torch.device):
    net = build(root, Fails)
    wrapper = whole(net, slots)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="in forward"):
            wrapper(batch(root), wrong=True)
        assert not compile_lock.is_taken
        torch.testing.assert_close(wrapper(batch(root)), net.layer(batch(root)))


def test_an_error_of_the_backend_is_raised_and_the_gate_is_open(slots: list, root: torch.device):
    broken = [True]

    def backend(graph, inputs):
        if broken:
            raise ZeroDivisionError("no such kernel")
        return graph.forward

    net = build(root)
    wrapper = DataParallel(net, slots, compile={"backend": backend})
    with pytest.raises(Exception, match="no such kernel"):
        wrapper(batch(root))
    assert not compile_lock.is_taken
    broken.clear()
    assert_same(steps(wrapper, net, [batch(root)]), expected_steps(slots, root, [batch(root)]))


def test_a_part_that_the_compiler_is_to_leave_alone(slots: list, root: torch.device, since: Since):
    net = build(root)
    net.last = torch.compiler.disable(net.last)
    expected = expected_steps(slots, root, [batch(root)] * 2)
    found = steps(compile_argument(net, slots), net, [batch(root)] * 2)
    assert_same(found, expected)
    assert since().total > 0


@pytest.mark.slots(1)
def test_a_single_slot_is_compiled_by_the_argument(slots: list, root: torch.device, since: Since):
    net = build(root)
    expected = expected_steps(slots, root, [batch(root)] * 2)
    assert_same(steps(compile_argument(net, slots), net, [batch(root)] * 2), expected)
    assert since().compilations == {torch.device(slots[0]): 1}


@pytest.mark.long
def test_hooks_of_modules_run_in_compiled_replicas(whole: Way, slots: list, root: torch.device):
    def outputs(wrapper: nn.Module, net: nn.Module) -> Tensor:
        net.first.register_forward_hook(lambda module, args, output: output * 2)
        net.register_forward_hook(lambda module, args, output: output + 1)
        return wrapper(batch(root)).detach()

    net = build(root)
    expected = outputs(DataParallel(net, slots), net)
    net = build(root)
    torch.testing.assert_close(outputs(whole(net, slots), net), expected)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"dynamic": True}, {"dynamic": False}, {"fullgraph": True}], ids=str)
def test_options_of_the_compiler_hold(options: dict, whole: Way, slots: list, root: torch.device, since: Since):
    net = build(root)
    wrapper = whole(net, slots, **options)
    batches = [batch(root, count) for count in (12, 9, 12, 9)]
    assert_same(steps(wrapper, net, batches), expected_steps(slots, root, batches))
    # With dynamic=True too, torch compiles twice for an input that is a view, as a chunk on the root is.
    assert set(since().compilations.values()) <= ({1, 2} if options == {"dynamic": True} else {2})


@pytest.mark.slots(2)
def test_nobody_runs_compiled_code_while_another_thread_compiles(slots: list, root: torch.device):
    begun, order = threading.Event(), []

    def slow(graph: Any, inputs: Any) -> Callable:
        begun.set()
        time.sleep(0.2)
        order.append("compiled")
        return graph.forward

    def noted(graph: Any, inputs: Any) -> Callable:
        def run(*args: Tensor) -> Any:
            order.append("ran")
            return graph.forward(*args)

        return run

    ready, other = (DataParallel(build(root), slots, compile={"backend": backend}) for backend in (noted, slow))
    ready(batch(root))
    order.clear()

    def work(index: int, barrier: object) -> None:
        if index == 0:
            other(batch(root))
        else:
            assert begun.wait(60)
            ready(batch(root))

    in_threads(2, work)
    assert order[0] == "compiled"
    assert order.count("ran") == len(slots)
