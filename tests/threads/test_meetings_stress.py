"""Ctrl-C at any moment while tasks meet, in a process of its own that is ended if it hangs."""

import signal
from collections.abc import Iterator

import pytest

from processes import Ahead, Job

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to a thread on this system"),
    pytest.mark.devices("cpu"),  # its processes are its own: once is enough
]

STRESS = """
import faulthandler, random, signal, sys, threading
import torch
from dataparallel.threads.gang import Gang
from dataparallel.threads.in_turn import SerialTasks
from dataparallel.threads.meetings import Meeting, here

rounds, rng, main = int(sys.argv[1]), random.Random(int(sys.argv[2])), threading.get_ident()
armed = False
sys.setswitchinterval(1e-5)  # as many places as possible where another thread can go on


def spin(count):
    for _ in range(count):
        pass


def press(go, delay):
    go.wait()
    spin(delay)
    signal.pthread_kill(main, signal.SIGINT)


def on_ctrl_c(*_):
    if armed:
        raise KeyboardInterrupt


def task(slot):
    for number in range(4):
        spin(rng.randrange(2000))
        assert here().meet(number, slot, lambda values: [sum(values)] * len(values)) == count * (count - 1) // 2


def tasks():
    meeting = Meeting([torch.device("cpu")] * count)
    each = [lambda slot=slot: meeting.run_replica(slot, lambda: task(slot)) for slot in range(count)]
    groups = rng.choice([None, ["a"] * count, [slot % 2 for slot in range(count)]])
    in_turn = rng.random() < 0.5
    meeting.turns = SerialTasks(each, each) if in_turn else Gang(each, rng.randrange(1, count + 1), groups)
    return meeting.turns


signal.signal(signal.SIGINT, on_ctrl_c)
for _ in range(rounds):
    faulthandler.dump_traceback_later(20, exit=True)
    count = rng.choice([2, 3, 4, 8])
    go = threading.Event()
    presser = threading.Thread(target=press, args=(go, rng.randrange(60_000)))
    presser.start()
    call = tasks()
    try:
        armed = True
        go.set()
        call.run_tasks()
        armed = False
    except KeyboardInterrupt:
        armed = False
    presser.join()
    assert [outcome.error for outcome in tasks().run_tasks()] == [None] * count
threads = sum(thread.name.startswith("dataparallel") for thread in threading.enumerate())
assert threads < 60, threads
print(*sys.argv[1:], "ended well")
"""


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    with Ahead(request, tmp_path_factory.mktemp("ahead"), lambda *run: Job(STRESS, run)) as ahead:
        yield ahead


RUNS = [("400", "0"), ("400", "1"), ("400", "2")]  # how often, the seed of the moments


@pytest.mark.long
@pytest.mark.parametrize("run", [pytest.param(run, marks=pytest.mark.ahead(*run), id=" ".join(run)) for run in RUNS])
def test_the_first_ctrl_c_ends_a_call_whose_tasks_meet(run: tuple[str, ...], printed: str) -> None:
    assert printed == " ".join([*run, "ended well\n"])
