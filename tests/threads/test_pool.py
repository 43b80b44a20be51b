"""Kept threads: each for one device, as few as possible, holding nothing; and the case that the system has no more.

Libraries keep handles for each pair of thread and device until the thread ends, so these pairs are counted.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.threads import pool
from dataparallel.threads.gang import Gang
from gangs import forget_idle_threads, values, worker_threads
from processes import run_script

CALLS = 200
TIMEOUT = 20.0


class Meets(nn.Module):
    """Notes which threads run on each device."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: defaultdict[Hashable, set[int]] = defaultdict(set)

    def forward(self, x: Tensor) -> Tensor:
        self.threads[x.device].add(threading.get_ident())
        return x + 1


def call_often(wrapped: DataParallel, root: torch.device) -> None:
    batch = torch.zeros(len(wrapped.device_ids), 1, device=root)
    for _ in range(CALLS):
        wrapped(batch)


CALLS_UNTIL_THE_END = """
import threading
import torch
from torch import nn
from each_form import by_wrapper, replicated, sharded_whole

x = torch.randn(64, 64)

def call(model, begun):
    while True:
        model(x)
        begun.set()

for form in (by_wrapper, replicated, sharded_whole):
    model, begun = form(nn.Sequential(*(nn.Linear(64, 64) for _ in range(30))), ["cpu"] * 2), threading.Event()
    threading.Thread(target=call, args=(model, begun), daemon=True).start()
    begun.wait()
print("the end")
"""


@pytest.mark.long
@pytest.mark.devices("cpu")
def test_a_process_ends_while_daemon_threads_call_each_form() -> None:
    assert run_script(CALLS_UNTIL_THE_END) == "the end\n"


@pytest.mark.slots(8)
def test_a_device_meets_one_thread_for_each_of_its_slots(slots: list, root: torch.device) -> None:
    module = Meets()
    call_often(DataParallel(module, slots, workers=8), root)
    for device, number in Counter(map(torch.device, slots)).items():
        assert 1 <= len(module.threads[device]) <= number


class Devices:
    """Tasks of a gang that note which thread runs for which device."""

    def __init__(self) -> None:
        self.threads: defaultdict[Hashable, set[str]] = defaultdict(set)

    def run(self, devices: list, permits: int, wait: Any = lambda: None, **options: Any) -> None:
        def task(device: Hashable) -> None:
            self.threads[device].add(threading.current_thread().name)
            wait()

        gang = Gang([lambda device=device: task(device) for device in devices], permits, devices=devices, **options)
        assert [outcome.error for outcome in gang.run_tasks()] == [None] * len(devices)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool without threads."""
    forget_idle_threads(monkeypatch)


@pytest.mark.devices("cpu")
@pytest.mark.usefixtures("fresh")
class TestKeys:
    """Any key will do for a device. Gangs know no slots: once is enough."""

    def test_each_device_has_one_thread_whatever_gangs_ask_for(self):
        seen = Devices()
        for call in range(CALLS):
            devices = [(call + place) % 8 for place in range(1 + call % 8)]
            seen.run(devices, 8)
        assert {device: len(threads) for device, threads in seen.threads.items()} == dict.fromkeys(range(8), 1)
        assert len(set.union(*seen.threads.values())) == 8

    def test_where_the_system_has_no_more_threads_those_of_other_devices_help(self, monkeypatch):
        Devices().run([0, 1, 2], 3, threading.Barrier(3).wait)
        before = worker_threads()

        def no_threads(worker: pool.Worker) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(pool.Worker, "start", no_threads)
        Devices().run([3, 4, 5], 3, threading.Barrier(3).wait)
        assert worker_threads() == before
        outcomes = Gang([threading.Barrier(3).wait] * 3 + [int], 4, devices=[6, 7, 8, 9]).run_tasks()
        assert [str(outcome.error) for outcome in outcomes] == ["None"] * 3 + ["can't start new thread"]


@pytest.mark.parametrize("possible", [0, 1, 2])
@pytest.mark.parametrize("permits", [1, 2, 4])
@pytest.mark.devices("cpu")  # gangs know no slots: once is enough
def test_too_few_threads_are_an_error_and_no_hang(possible: int, permits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_idle_threads(monkeypatch)
    start, left = pool.Worker.start, [None] * possible

    def start_while_possible(worker: pool.Worker) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(worker)

    together = threading.Barrier(min(permits, 4))
    with monkeypatch.context() as patch:
        patch.setattr(pool.Worker, "start", start_while_possible)
        gang = Gang([lambda: together.wait(TIMEOUT if possible >= permits else 0.1)] * 4, permits)
        if not possible:
            with pytest.raises(RuntimeError, match="new thread"):
                gang.run_tasks()
            return
        outcomes = gang.run_tasks()
    errors = [outcome.error for outcome in outcomes]
    if possible >= permits:
        assert errors == [None] * 4
    else:
        assert any(isinstance(error, RuntimeError) and "new thread" in str(error) for error in errors)
    assert values([int] * 4, permits) == [0] * 4
