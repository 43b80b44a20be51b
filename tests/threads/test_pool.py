"""Kept threads: each for one device, as few as possible, holding nothing; and the case that the system has no more.

Libraries keep handles for each pair of thread and device until the thread ends, so these pairs are counted.
"""

import gc
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.threads import pool
from dataparallel.threads.gang import Gang
from gangs import forget_idle_threads, values, worker_threads

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


@pytest.mark.slots(8)
def test_a_device_meets_one_thread_for_each_of_its_slots(slots: list, root: torch.device) -> None:
    module = Meets()
    call_often(DataParallel(module, slots, workers=8), root)
    for device, number in Counter(map(torch.device, slots)).items():
        assert 1 <= len(module.threads[device]) <= number


@pytest.mark.slots(8)
def test_two_wrappers_at_a_time_meet_two_for_each(slots: list, root: torch.device) -> None:
    module = Meets()
    with ThreadPoolExecutor(2) as users:
        for done in [users.submit(call_often, DataParallel(module, slots, workers=8), root) for _ in range(2)]:
            done.result()
    for device, number in Counter(map(torch.device, slots)).items():
        assert 1 <= len(module.threads[device]) <= 2 * number


@pytest.mark.slots(8)
def test_wrappers_of_other_devices_leave_them_where_they_are(slots: list, root: torch.device) -> None:
    module = Meets()
    wrappers = [DataParallel(module, half, workers=4) for half in (slots[:4], slots[4:])]
    for _ in range(CALLS):
        for wrapped in wrappers:
            wrapped(torch.zeros(4, 1, device=wrapped.src_device_obj))
    for device, number in Counter(map(torch.device, slots)).items():
        assert 1 <= len(module.threads[device]) <= number


@pytest.mark.slots(8)
@pytest.mark.parametrize("permits", [2, 3])
def test_with_few_permits_as_many_threads_meet_all_devices(permits: int, slots: list, root: torch.device) -> None:
    module = Meets()
    call_often(DataParallel(module, slots, workers=permits), root)
    assert 1 <= len(set.union(*module.threads.values())) <= permits


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

    def test_threads_are_idle_before_the_next_call(self, monkeypatch):
        release, seen = pool.release, Devices()

        def release_late(worker: pool.Worker) -> None:
            time.sleep(0.01)
            release(worker)

        monkeypatch.setattr(pool, "release", release_late)
        for _ in range(10):
            seen.run([0, 1], 2)
        assert {device: len(threads) for device, threads in seen.threads.items()} == {0: 1, 1: 1}

    def test_with_groups_they_are_kept_too(self):
        seen = Devices()
        for _ in range(CALLS):
            seen.run([0, 0, 1, 1, 2, 2], 3, groups=[0, 0, 1, 1, 2, 2])
        assert {device: len(threads) for device, threads in seen.threads.items()} == dict.fromkeys(range(3), 1)

    def test_without_devices_all_threads_are_alike(self):
        before = len(worker_threads())
        for devices in (None, ["here"] * 4):
            for _ in range(CALLS):
                Gang([threading.Barrier(4).wait] * 4, 4, devices=devices).run_tasks()
        assert len(worker_threads()) - before == 8

    def test_after_a_stall_each_task_starts_in_a_thread_of_its_device(self):
        seen, barrier = Devices(), threading.Barrier(4)
        for _ in range(3):
            seen.run([0, 1, 2, 3], 1, lambda: barrier.wait(TIMEOUT), stall_timeout=0.2)
        assert {device: len(threads) for device, threads in seen.threads.items()} == dict.fromkeys(range(4), 1)


@pytest.mark.devices("cpu")  # gangs know no slots: once is enough
def test_a_thread_that_is_slow_to_go_idle_keeps_nothing_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        def __call__(self) -> None:
            pass

    work = Gang._run_in_worker

    def leave_slowly(gang: Gang, slot: int | None, worker: pool.Worker) -> None:
        work(gang, slot, worker)
        time.sleep(0.2)

    task = Task()
    alive = weakref.ref(task)
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(Gang, "_run_in_worker", leave_slowly)
        Gang([task], 1).run_tasks()
        del task
        assert alive() is None


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


@pytest.mark.devices("cpu")  # gangs know no slots: once is enough
def test_too_few_threads_for_a_nested_gang_are_an_error_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_idle_threads(monkeypatch)
    start, running = pool.Worker.start, []

    def start_one(worker: pool.Worker) -> None:
        if running:
            raise RuntimeError("can't start new thread")
        running.append(worker)
        start(worker)

    monkeypatch.setattr(pool.Worker, "start", start_one)
    outcome = Gang([lambda: values([int], 1)], 1).run_tasks()[0]
    assert isinstance(outcome.error, RuntimeError)
    assert values([int] * 3, 1) == [0] * 3
