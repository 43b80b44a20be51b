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
from dataparallel.threads.gang import Gang

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


def press(go, delays):
    go.wait()
    for delay in delays:
        spin(delay)
        signal.pthread_kill(main, signal.SIGINT)


def on_ctrl_c(*_):
    if armed:
        raise KeyboardInterrupt


signal.signal(signal.SIGINT, on_ctrl_c)
task = {"short": short, "fails": fails, "nests": nests}[kind]
for _ in range(rounds):
    faulthandler.dump_traceback_later(10, exit=True)
    go = threading.Event()
    delays = [rng.randrange(40_000), rng.randrange(2_000)][: rng.choice([1, 2])]
    presser = threading.Thread(target=press, args=(go, delays))
    presser.start()
    gang = Gang([task] * 4, rng.choice([1, 2, 4]))
    try:
        try:
            armed = True
            go.set()
            gang.run_tasks()
            for _ in range(500):  # not join: an interrupt there can become a RuntimeError of Python's own
                time.sleep(0.01)
            raise SystemExit("the interrupt got lost")
        except KeyboardInterrupt:
            armed = False
    except KeyboardInterrupt:  # the second
        armed = False
    presser.join()
    assert [outcome.value for outcome in Gang([lambda i=i: i for i in range(4)], 4).run_tasks()] == [0, 1, 2, 3]
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


@pytest.mark.long
@pytest.mark.parametrize("run", [pytest.param(run, marks=pytest.mark.ahead(*run), id=" ".join(run)) for run in RUNS])
def test_ctrl_c_at_any_time(run: tuple[str, ...], printed: str) -> None:
    assert printed == " ".join([*run, "ended well\n"])
