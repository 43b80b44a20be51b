"""Kept threads: each for one device, as few as possible; and the case that the system has no more.

Libraries keep handles for each pair of thread and device until the thread ends, so these pairs are counted.
"""

import threading
from collections import Counter, defaultdict

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.threads import pool
from dataparallel.threads.gang import Gang
from gangs import forget_idle_threads, values
from processes import run_script

CALLS = 200
TIMEOUT = 20.0


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
def test_a_device_meets_one_thread_for_each_of_its_slots_whoever_calls(slots: list) -> None:
    threads: defaultdict[torch.device, set[int]] = defaultdict(set)

    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            threads[x.device].add(threading.get_ident())
            return x

    wrappers = [DataParallel(Notes(), some, workers=8) for some in (slots, slots[:4], slots[4:])]
    for _ in range(CALLS):
        for wrapped in wrappers:
            wrapped(torch.zeros(8, 1, device=wrapped.src_device_obj))
    for device, number in Counter(map(torch.device, slots)).items():
        assert 1 <= len(threads[device]) <= number


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
