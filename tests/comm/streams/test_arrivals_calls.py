"""Parameters travel while replicas compute, whichever calls meet: of several threads, before one backward, that fail.

Clocks tell what a stream has waited for: to touch memory too early is a race.
"""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from at_once import in_threads
from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.composable import replicate
from late_parameters import ARRANGEMENTS, WIDTH, Net, arranged, copy_of, samples, silently, steps, trained
from steps import build, gradients, numbers

pytestmark = [pytest.mark.devices("sim", "stand-in"), pytest.mark.usefixtures("no_compiler")]


@pytest.fixture(params=[*ARRANGEMENTS])
def slots(request: pytest.FixtureRequest) -> list:
    return arranged(request.param)


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return samples(root)


def test_several_threads_call_one_wrapper(slots: list, root: torch.device, x: Tensor, form: Callable) -> None:
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)

    def run(*_: object) -> None:
        for _ in range(3):
            call(x).sum().backward()

    in_threads(3, run)


def test_a_thread_does_not_write_to_kept_replicas_of_another(
    slots: list, root: torch.device, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a second thread's call gave them new values, the first thread might read them at the same time."""
    model = Net().double().to(root)
    call = replicate(model, devices=slots, bucket_cap_mb=1e-9, first_bucket_mb=1e-9)
    steps(model, call, x)
    inside, done = threading.Event(), threading.Event()

    def meet(net: nn.Module) -> None:
        if threading.current_thread().name == "second" or silently(net.first, "bias").device != root:
            return
        if first_call.is_set() and not inside.is_set():
            inside.set()
            done.wait(20)

    def second() -> None:
        inside.wait(20)
        errors.extend(raised_by(lambda: call(x)))
        done.set()

    errors: list[BaseException] = []
    first_call = threading.Event()
    model.does = meet
    thread = threading.Thread(target=second, name="second")
    thread.start()
    first_call.set()
    errors.extend(raised_by(lambda: call(x).sum().backward()))
    thread.join()
    assert not errors, errors


def raised_by(task: Callable[[], object]) -> list[BaseException]:
    try:
        task()
    except RuntimeError as error:
        return [error]
    return []


def test_two_forwards_before_one_backward(slots: list, root: torch.device, x: Tensor, form: Callable) -> None:
    model = Net().double().to(root)
    twin = copy_of(model)
    call = form(model, slots)
    for _ in range(3):
        model.zero_grad()
        (call(x).square().sum() + call(2 * x).square().sum()).backward()
    (twin(x).square().sum() + twin(2 * x).square().sum()).backward()
    for ours, theirs in zip(trained(model), trained(twin), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_inside_recomputes_with_lookups(
    use_reentrant: bool, slots: list, root: torch.device, form: Callable
) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    model = Checkpointed().double().to(root)
    twin = copy_of(model)
    call = form(model, slots)
    x = torch.randn(8, WIDTH, dtype=torch.float64).to(root).requires_grad_()
    for _ in range(3):
        model.zero_grad()
        call(x).square().sum().backward()
    twin(x.detach()).square().sum().backward()
    for ours, theirs in zip(trained(model), trained(twin), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


def test_a_replica_that_fails_leaves_no_race(slots: list, root: torch.device, x: Tensor, form: Callable) -> None:
    def fail(net: nn.Module) -> None:
        if silently(net.last, "bias").device != root or len({*slots}) == 1:
            raise ArithmeticError("no")

    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    model.does = fail
    with pytest.raises(ArithmeticError):
        call(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)
    model.does = None
    steps(model, call, x)


def test_a_failure_while_copies_are_sent_leaves_no_race(
    slots: list, root: torch.device, x: Tensor, form: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    with monkeypatch.context() as patch:
        patch.setattr(Arrivals, "expect", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call(x)
    steps(model, call, x)


def test_on_the_callers_streams_too(slots: list, side_streams: dict, form: Callable) -> None:
    root = torch.device(slots[0])
    model, x = build(root), numbers(root)
    expected = gradients(model(x).square().sum(), model, x)
    call = form(model, slots)
    for _ in range(3):
        for ours, theirs in zip(gradients(call(x).square().sum(), model, x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
