"""While threads of a backward that has failed go on, nothing of it is left, and the next step is that of one device.

Layers that fail, and devices without room, are drawn by test_state_machine.
"""

import copy
import itertools
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from loops import wait_for_the_engine
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import assert_equal, mean_square_loss
from fragile import MARK, Fragile, raises
from memory import live_objects
from sharded_chains import Chain
from sharded_steps import assert_all_sharded, gradients, no_sync, on_device, sharded

WIDTH = 16


def build() -> Any:
    """Four units. The last column of a batch goes through all layers: it says on which slot a layer fails."""
    return Chain(*(Fragile(WIDTH) for _ in range(5)))


def batch(slots: list, seed: int, *, marked: int | None = None) -> Tensor:
    """Three samples for each slot but the last, which has two. The chunk of slot ``marked`` says that it is to fail."""
    (x,), _ = numbers(WIDTH)(3 * len(slots) - 1, seed)
    if marked is not None:
        x.chunk(len(slots))[marked][0, -1] = MARK
    return x.to(slots[0])


class Training:
    """A sharded model, after some steps, and its twin on one device."""

    def __init__(self, slots: list) -> None:
        self.slots = slots
        self.model, self.twin = (on_device(seeded(build), slots[0]) for _ in range(2))
        sharded(self.model, slots)
        self.seed = itertools.count()
        for _ in range(3):
            self.compare()

    def compare(self) -> None:
        """A step of both. The gradients are the same."""
        x = batch(self.slots, next(self.seed))
        for each in (self.model, self.twin):
            self.run(each, x)
        assert_equal(gradients(self.model), gradients(self.twin), "gradients", atol=1e-9)
        with torch.no_grad():
            for parameter in (*self.model.parameters(), *self.twin.parameters()):
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None

    @staticmethod
    def run(model: nn.Module, x: Tensor) -> None:
        mean_square_loss(model(x)).backward()


class Held:
    """A thread of a failing backward that stays where it calls `stay`, until ``released`` is set."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def stay(self, *_: Any) -> None:
        self.begun.set()
        assert self.released.wait(60)

    def fail(self, gradient: Tensor) -> None:
        assert self.begun.wait(60)
        raises(gradient)

    def failing(self, model: nn.Module, x: Tensor, at: nn.Module | None = None, device: Any = None) -> Tensor:
        """A loss. The thread that calls its backward raises while the other one stays: it computes on the CPU itself.

        With ``at`` that one is the thread of ``device``, behind that module.
        """
        here = torch.device(device or "cpu")

        def hooked(module: nn.Module, inputs: object, output: Tensor) -> None:
            output.register_hook(lambda gradient: self.stay() if gradient.device == here else None)

        handle = (at or nn.Identity()).register_forward_hook(hooked)
        on_cpu = torch.ones((), requires_grad=True)
        on_cpu.register_hook(self.fail)
        loss = mean_square_loss(model(x)) + (on_cpu * on_cpu).to(x.device)
        handle.remove()
        return loss


@pytest.mark.slots(3)
@pytest.mark.devices("sim", "cuda")
def test_gradients_zeroed_after_a_failed_backward_stay_so_though_a_thread_of_it_still_sums(slots):
    training, held = Training(slots), Held()
    model, layer = training.model, training.model.units()[3]
    layer.set_all_reduce_hook(held.stay)
    loss = held.failing(model, batch(slots, next(training.seed)))
    with pytest.raises(ArithmeticError):
        loss.backward()
    model.zero_grad()
    layer.set_all_reduce_hook(lambda part: None)
    held.released.set()
    training.compare()


@pytest.mark.slots(3)
@pytest.mark.devices("sim", "cuda")
@pytest.mark.parametrize("quietly", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_waited_and_are_zeroed_while_a_failed_backward_runs_on_are_gone(quietly, set_to_none, slots):
    """They belong to the `.grad` from before that backward, though it ends after the user has zeroed that."""
    training, held = Training(slots), Held()
    model = training.model
    with no_sync(model):
        training.run(model, batch(slots, next(training.seed)))
    with no_sync(model) if quietly else nullcontext():
        loss = held.failing(model, batch(slots, next(training.seed)), model.units()[1], slots[1])
        with pytest.raises(ArithmeticError):
            loss.backward()
    model.zero_grad(set_to_none)
    held.released.set()
    training.compare()


@pytest.mark.slots(2)
def test_gradients_that_waited_are_gone_when_they_are_zeroed_after_the_sums_have_failed(slots):
    """Units that were summed before another one failed have given their gradients away, and got them back."""
    training = Training(slots)
    model = training.model
    with no_sync(model):
        training.run(model, batch(slots, next(training.seed)))
    calls = itertools.count()

    def refuse_what_waited(part: Tensor) -> None:  # two owners have summed what the one slot has delivered
        if next(calls) >= 2:
            raise ArithmeticError("in the sum of what waited")

    model.units()[3].set_all_reduce_hook(refuse_what_waited)
    with pytest.raises(ArithmeticError, match="of what waited"):
        training.run(model, batch(slots, next(training.seed))[:1])
    model.units()[3].set_all_reduce_hook(lambda part: None)
    model.zero_grad()
    training.compare()


@pytest.mark.slots(3)
@pytest.mark.parametrize("layer", range(4))
def test_gradients_that_wait_on_the_slots_outlive_a_failed_backward(layer, slots):
    """Like `.grad` on one device they have gradients of the failed pass added, where it came so far, or not."""
    training = Training(slots)
    model, twin = training.model, training.twin
    kept, failing, last = batch(slots, 200), batch(slots, 201, marked=1), batch(slots, 202)
    with no_sync(model):
        training.run(model, kept)
    model.units()[layer].fails[0] = "hook"
    with pytest.raises(ArithmeticError):
        training.run(model, failing)
    model.units()[layer].fails[0] = ""
    training.run(model, last)
    without, added = {}, {}
    for found, batches in ((without, (kept, last)), (added, (kept, failing, last))):
        for each in batches:
            training.run(twin, each)
        found.update(gradients(twin))
        twin.zero_grad()
    for name, gradient in gradients(model).items():
        expected = [each[name] for each in (without, added)]
        assert any(torch.allclose(gradient, each, rtol=0, atol=1e-9) for each in expected), name
    model.zero_grad()
    training.compare()


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(2)
@pytest.mark.apart(2)
@pytest.mark.parametrize("what", ["a step", "a backward"])
def test_a_backward_beside_one_that_has_failed_is_refused(what, slots):
    """The first one's error is there while a thread is in a node of it, and the second one returns before it leaves."""
    training, held = Training(slots), Held()
    model = training.model
    optimizer = torch.optim.SGD(model.parameters())
    failing = held.failing(model, batch(slots, 300), model.units()[0], slots[1])
    second, third = (mean_square_loss(model(batch(slots, 301)[:1])) for _ in range(2))
    with pytest.raises(ArithmeticError):
        failing.backward()
    second.backward()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()  # of other parameters: not refused, and does not wait
    leaves = threading.Timer(0.2, held.released.set)
    leaves.start()
    if what == "a backward":
        leaves.join()
        wait_for_the_engine(slots)
    with pytest.raises(RuntimeError, match=r"gradients of the unit .* are incomplete .*zero_grad"):
        (optimizer.step if what == "a step" else third.backward)()
    leaves.join()
    wait_for_the_engine(slots)
    assert_all_sharded(model)
    optimizer.zero_grad()
    training.compare()


@pytest.mark.slots(4)
@pytest.mark.counts_memory
def test_errors_leave_no_threads_and_no_objects(slots):
    training = Training(slots)
    model = training.model

    def run() -> None:
        for kind, layer in itertools.product(("forward", "hook", "backward"), range(4)):
            model.units()[layer].fails[0] = kind
            with pytest.raises(ArithmeticError), no_sync(model) if layer == 2 else nullcontext():
                training.run(model, batch(slots, next(training.seed), marked=layer))
            model.units()[layer].fails[0] = ""
            model.zero_grad()
            training.compare()
        wait_for_the_engine(slots)

    run()
    threads, objects = threading.active_count(), live_objects()
    run()
    assert threading.active_count() <= threads
    assert live_objects() <= objects + 20


def test_a_sparse_gradient_is_refused_by_name(slots: list) -> None:
    model: Any = fully_shard(nn.Sequential(nn.Embedding(11, 4, sparse=True)).to(slots[0]), devices=slots)
    output = model(torch.arange(6, device=slots[0]))
    with pytest.raises(TypeError, match=r"shape \[11, 4\] in 'Sequential' has the layout .*sparse=False"):
        output.sum().backward()
    wait_for_the_engine(slots)
    assert_all_sharded(model)


@pytest.mark.devices("cpu")  # a device's thread of the engine would wait for itself
@pytest.mark.slots(3)
@pytest.mark.parametrize(("fails", "waits"), [(True, False), (False, False), (False, True)])
def test_a_unit_that_is_called_alone_loses_no_gradient_of_another_backward(fails, waits, slots, root):
    """Its backward runs in another thread, while one slot of the model has delivered, and fails or not."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double().to(root)
    twin, threads, x = copy.deepcopy(model), list[threading.Thread](), torch.ones(3, 4, dtype=torch.double, device=root)
    for unit in (model[1], model):
        fully_shard(unit, devices=slots)
    leaf = x.clone().requires_grad_()
    if fails:
        leaf.register_hook(raises)
    other = model[1](leaf).sum()

    def run_other() -> None:
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            other.backward()

    def meanwhile(gradient: Tensor) -> None:
        if not threads:
            threads.append(threading.Thread(target=run_other))
            threads[0].start()
            threads[0].join()

    handle = model[0].register_forward_hook(lambda module, args, output: output.register_hook(meanwhile) and None)
    with model.no_sync() if waits else nullcontext():
        loss = model(x).sum()
        handle.remove()
        loss.backward()
    if waits:
        model(x).sum().backward()
    wait_for_the_engine(slots)
    for _ in range(1 + waits):
        twin(x).sum().backward()
    if not fails:
        twin[1](x).sum().backward()
    assert_equal(gradients(model), gradients(twin), "gradients", atol=1e-9)
