"""Ctrl-C at any moment, once or twice, many times, in a process of its own that is ended if it hangs."""

import signal
from collections.abc import Iterator

import pytest

from processes import Ahead, Job

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to a thread on this system"),
    pytest.mark.devices("cpu"),  # its processes are its own: once is enough
]

STRESS = """
import faulthandler, random, signal, sys, threading, time
import torch
from dataparallel.threads.gang import Gang
from dataparallel.threads.gang import SerialTasks
from dataparallel.threads.meetings import Meeting, here

kind, rounds, rng, main = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3])), threading.get_ident()
armed = False
sys.setswitchinterval(1e-5)  # as many places as possible where another thread can go on


def spin(count):
    for _ in range(count):
        pass


def short():
    spin(rng.randrange(600))


def fails():
    short()
    raise ValueError


def nests():
    Gang([short] * 3, 2).run_tasks()


def meets(slot, count):
    for number in range(4):
        spin(rng.randrange(2000))
        assert here().meet(number, slot, lambda values: [sum(values)] * count) == count * (count - 1) // 2


def tasks_that_meet():
    count = rng.choice([2, 3, 4, 8])
    meeting = Meeting([torch.device("cpu")] * count)
    each = [lambda slot=slot: meeting.run_replica(slot, lambda: meets(slot, count)) for slot in range(count)]
    groups = rng.choice([None, ["a"] * count, [slot % 2 for slot in range(count)]])
    in_turn = rng.random() < 0.5
    meeting.scheduler = SerialTasks(each, each) if in_turn else Gang(each, rng.randrange(1, count + 1), groups)
    return meeting.scheduler


def press(go, delays):
    go.wait()
    for delay in delays:
        spin(delay)
        signal.pthread_kill(main, signal.SIGINT)


def on_ctrl_c(*_):
    if armed:
        raise KeyboardInterrupt


def run_interrupted():
    global armed
    delays = [rng.randrange(50_000), rng.randrange(2_000)][: 1 if kind == "meets" else rng.choice([1, 2])]
    call = tasks_that_meet() if kind == "meets" else Gang([globals()[kind]] * 4, rng.choice([1, 2, 4]))
    go = threading.Event()
    presser = threading.Thread(target=press, args=(go, delays))
    presser.start()
    try:
        try:
            armed = True
            go.set()
            call.run_tasks()
            if kind == "meets":  # the interrupt may be the outcome of a task
                armed = False
                return presser
            for _ in range(500):  # not join: an interrupt there can become a RuntimeError of Python's own
                time.sleep(0.01)
            raise SystemExit("the interrupt got lost")
        except KeyboardInterrupt:
            armed = False
    except KeyboardInterrupt:  # the second
        armed = False
    return presser


signal.signal(signal.SIGINT, on_ctrl_c)
for _ in range(rounds):
    faulthandler.dump_traceback_later(20, exit=True)
    run_interrupted().join()
    assert [outcome.value for outcome in Gang([lambda i=i: i for i in range(4)], 4).run_tasks()] == [0, 1, 2, 3]
    assert {outcome.error for outcome in tasks_that_meet().run_tasks()} == {None}
threads = sum(thread.name.startswith("dataparallel") for thread in threading.enumerate())
assert threads < 100, threads
print(*sys.argv[1:], "ended well")
"""


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    with Ahead(request, tmp_path_factory.mktemp("ahead"), lambda *run: Job(STRESS, run)) as ahead:
        yield ahead


# The kind of task, how often, the seed of the moments.
RUNS = [("nests", "75", "0"), ("nests", "75", "1"), ("short", "150", "0"), ("fails", "150", "0")]
RUNS += [("meets", "400", seed) for seed in "012"]


@pytest.mark.parametrize("run", [pytest.param(run, marks=pytest.mark.ahead(*run), id=" ".join(run)) for run in RUNS])
def test_ctrl_c_at_any_time(run: tuple[str, ...], printed: str) -> None:
    assert printed == " ".join([*run, "ended well\n"])
