"""Ctrl-C while a gang runs: the first waits for running operators, the second abandons their threads."""

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel, workers
from dataparallel.workers import Gang

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to a thread on this system"),
    pytest.mark.usefixtures("ctrl_c"),
]

TIMEOUT = 10.0
MAIN = threading.main_thread().ident


def press_ctrl_c() -> None:
    """From any thread, the main one too."""
    assert MAIN is not None
    signal.pthread_kill(MAIN, signal.SIGINT)


@contextlib.contextmanager
def interrupted_when(*presses: threading.Event) -> Iterator[None]:
    """Expects ``KeyboardInterrupt`` from its body; Ctrl-C is pressed once for each event, when it is set.

    A body that hangs in spite of it is freed by one more and fails the test.
    """
    over, rescued = threading.Event(), []

    def press() -> None:
        for event in presses:
            if not event.wait(TIMEOUT):
                rescued.append("the test never got as far as Ctrl-C")
                break
            press_ctrl_c()
        if not over.wait(TIMEOUT):
            rescued.append("Ctrl-C was pressed and the call went on waiting")
            press_ctrl_c()
            if not over.wait(TIMEOUT):
                press_ctrl_c()

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    try:
        yield
        time.sleep(1)  # the signal may be on its way
    except KeyboardInterrupt:
        over.set()
    else:
        rescued.append("Ctrl-C was pressed and nothing was raised")
    finally:
        over.set()
    thread.join()
    assert not rescued


def spin() -> None:
    while True:
        pass


def assert_gangs_work() -> None:
    for permits in (4, 1):
        outcomes = Gang([lambda slot=slot: slot for slot in range(4)], permits).run()
        assert [outcome.value for outcome in outcomes] == [0, 1, 2, 3]


class Steps:
    """A task that goes on until it is interrupted, and tells when it began and whether it has ended.

    It tells so once: an interrupt inside of ``Event.set`` would leave the event locked, as Ctrl-C does on one device.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step
        self.began = threading.Event()
        self.ended = False

    def __call__(self) -> None:
        try:
            self.began.set()
            while True:
                self.step()
        finally:
            self.ended = True


@pytest.mark.parametrize(
    "step",
    [int, lambda: time.sleep(0.3), lambda: torch.ones(64, 64) @ torch.ones(64, 64)],
    ids=["loop", "sleep", "torch"],
)
def test_ctrl_c_ends_running_tasks_after_their_operator(step: Callable[[], Any]) -> None:
    tasks = [Steps(step) for _ in range(3)]
    began = time.perf_counter()
    with interrupted_when(tasks[2].began):
        try:
            Gang(tasks, 3).run()
        finally:
            ended = [task.ended for task in tasks if task.began.is_set()]
    assert ended  # the third has begun; an earlier one may have been interrupted on its way in
    assert all(ended)
    assert time.perf_counter() - began < 5
    assert_gangs_work()


def test_ctrl_c_starts_no_further_task() -> None:
    first, ran = Steps(int), []
    with interrupted_when(first.began):
        Gang([first, lambda: ran.append(1), lambda: ran.append(2)], 1).run()
    time.sleep(0.05)
    assert ran == []


def test_ctrl_c_ends_nested_gangs() -> None:
    inner = [Steps(int) for _ in range(4)]
    outer = [lambda pair=pair: Gang(pair, 2).run() for pair in (inner[:2], inner[2:])]
    with interrupted_when(inner[3].began):
        try:
            Gang(outer, 2).run()
        finally:
            ended = [task.ended for task in inner if task.began.is_set()]
    assert all(ended)
    assert_gangs_work()


def test_ctrl_c_ends_a_task_that_waits_for_a_permit() -> None:
    spinning = Steps(int)
    waits = [lambda: (Gang([lambda: spinning.began.wait(TIMEOUT)], 1).run(), spin()), spinning]
    with interrupted_when(spinning.began):
        Gang(waits, 1).run()
    assert_gangs_work()


def test_ctrl_c_leaves_gangs_of_other_threads_alone() -> None:
    begun, go_on, outcomes = threading.Event(), threading.Event(), []

    def others() -> str:
        begun.set()
        assert go_on.wait(TIMEOUT)
        return "done"

    user = threading.Thread(target=lambda: outcomes.extend(Gang([others] * 2, 1).run()), daemon=True)
    user.start()
    assert begun.wait(TIMEOUT)
    task = Steps(int)
    with interrupted_when(task.began):
        Gang([task], 1).run()
    go_on.set()
    user.join(TIMEOUT)
    assert [outcome.value for outcome in outcomes] == ["done"] * 2


class Stubborn:
    """A task that the first Ctrl-C does not end."""

    def __init__(self, swallows: bool) -> None:
        self.swallows = swallows
        self.began, self.again, self.released = (threading.Event() for _ in range(3))
        self.thread: threading.Thread | None = None

    def __call__(self) -> None:
        self.thread = threading.current_thread()
        if self.swallows:
            with contextlib.suppress(BaseException):
                self.began.set()
                spin()
            self.again.set()
        else:
            self.began.set()
        self.released.wait(2 * TIMEOUT)


@pytest.mark.parametrize("swallows", [True, False], ids=["swallows the first", "sits in an operator"])
def test_a_second_ctrl_c_abandons_the_threads(swallows: bool) -> None:
    task = Stubborn(swallows)
    if not swallows:
        threading.Timer(0.3, task.again.set).start()
    began = time.perf_counter()
    with interrupted_when(task.began, task.again):
        Gang([task], 1).run()
    assert time.perf_counter() - began < 5
    assert task.thread is not None
    assert task.thread.is_alive()
    idents: list[int] = []
    Gang([lambda: (idents.append(threading.get_ident()), time.sleep(0.01))] * 6, 6).run()
    assert task.thread.ident not in idents
    task.released.set()
    task.thread.join(TIMEOUT)
    assert not task.thread.is_alive(), "an abandoned thread went back to the pool"
    assert_gangs_work()


def test_the_wrapper_works_again_after_ctrl_c(slots: list, root: torch.device) -> None:
    class Module(nn.Linear):
        endless = False
        began = threading.Event()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while self.endless:
                x = x + 0
                self.began.set()
            return super().forward(x)

    module = Module(4, 2).to(root)
    model, x = DataParallel(module, slots), torch.randn(6, 4, device=root)
    module.endless = True
    with interrupted_when(module.began):
        model(x)
    module.endless = False
    output = model(x)
    torch.testing.assert_close(output, nn.functional.linear(x, module.weight, module.bias))
    output.sum().backward()
    torch.testing.assert_close(module.bias.grad, torch.full_like(module.bias, 6.0))


def test_memory_of_an_interrupted_call_is_free_afterwards() -> None:
    class Activation:
        pass

    held: list[weakref.ref] = []
    began = threading.Event()

    def task() -> None:
        activation = Activation()
        held.append(weakref.ref(activation))
        began.set()
        spin()

    gc.collect()
    gc.disable()
    try:
        with interrupted_when(began):
            Gang([task] * 2, 1).run()
        assert [reference() for reference in held] == [None]
    finally:
        gc.enable()


def test_ctrl_c_while_a_thread_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_pool", workers._Pool())
    start, pressed = workers._Worker.start, threading.Event()

    def start_and_press(worker: workers._Worker) -> None:
        start(worker)
        pressed.set()
        spin()

    with monkeypatch.context() as patch:
        patch.setattr(workers._Worker, "start", start_and_press)
        with interrupted_when(pressed):
            Gang([int] * 3, 3).run()
    assert_gangs_work()


def test_ctrl_c_while_a_task_starts_a_nested_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_pool", workers._Pool())
    start, pressed = workers._Worker.start, threading.Event()

    def start_and_press(worker: workers._Worker) -> None:
        start(worker)
        if threading.current_thread() is not threading.main_thread():
            pressed.set()
            while not outer._interrupted:
                time.sleep(0)

    with monkeypatch.context() as patch:
        patch.setattr(workers._Worker, "start", start_and_press)
        outer = Gang([lambda: Gang([spin] * 2, 2).run()], 1)
        with interrupted_when(pressed):
            outer.run()
    assert_gangs_work()


def test_ctrl_c_while_the_error_of_a_task_is_being_noted() -> None:
    noting = threading.Event()

    class SlowToNote(Exception):
        def with_traceback(self, traceback: Any) -> "SlowToNote":
            noting.set()
            while not gang._interrupted:
                time.sleep(0)
            return super().with_traceback(traceback)

    def fail() -> None:
        raise SlowToNote

    gang = Gang([fail], 1)
    with interrupted_when(noting):
        gang.run()
    assert_gangs_work()
