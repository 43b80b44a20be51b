"""Ctrl-C while a gang runs: the first waits for running tasks and starts no others, the second is raised at once."""

import signal
from collections.abc import Iterator

import pytest

from processes import Ahead, Job

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to a thread on this system"),
    pytest.mark.devices("cpu"),  # its processes are its own: once is enough
]

PRELUDE = """
import contextlib, os, signal, threading, time
from dataparallel.threads.gang import Gang, SerialTasks
from dataparallel.threads.pool import Skipped

TIMEOUT = 20
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore it


def afterwards(*steps):
    '''Runs the steps one after the other, in a thread of their own.'''
    thread = threading.Thread(target=lambda: [step() for step in steps], daemon=True)
    thread.start()
    return thread


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.25)  # longer than a waiting thread needs to look up


class Task:
    '''Goes on until it may end.'''

    def __init__(self):
        self.began, self.may_end = threading.Event(), threading.Event()
        self.thread, self.has_ended = None, False

    def __call__(self):
        self.thread = threading.current_thread()
        self.began.set()
        assert self.may_end.wait(TIMEOUT)
        self.has_ended = True


@contextlib.contextmanager
def interrupted():
    try:
        yield
    except KeyboardInterrupt:
        return
    raise AssertionError("no KeyboardInterrupt")


def idents(count):
    together = threading.Barrier(count)
    outcomes = Gang([lambda: (together.wait(TIMEOUT), threading.get_ident())[1]] * count, count).run_tasks()
    return {outcome.value for outcome in outcomes}


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("dataparallel-worker")}


def gangs_work():
    for permits in (1, 4):
        tasks = [lambda i=i: i for i in range(4)]
        assert [outcome.value for outcome in Gang(tasks, permits).run_tasks()] == [0, 1, 2, 3]
"""


SCRIPTS = {
    "the first waits for running tasks and starts none": """
for permits in (1, 2, 4):
    tasks = [Task() for _ in range(4)]
    running, waiting = tasks[:permits], tasks[permits:]
    begun = [task.began.wait for task in running]
    afterwards(*begun, ctrl_c, *[task.may_end.set for task in running])
    with interrupted():
        Gang(tasks, permits).run_tasks()
    assert all(task.has_ended for task in running)
    assert not any(task.began.is_set() for task in waiting)
    before = threads()
    idents(permits)
    assert threads() == before
    gangs_work()
    assert not any(task.began.is_set() for task in waiting)
""",
    "the second is raised at once and leaves the threads to themselves": """
tasks = [Task() for _ in range(4)]
running, waiting = tasks[:2], tasks[2:]
afterwards(*[task.began.wait for task in running], ctrl_c, ctrl_c, *[task.may_end.set for task in running])
with interrupted():
    Gang(tasks, 2).run_tasks()
assert not any(task.has_ended for task in running)
assert not {task.thread.ident for task in running} & idents(4)
gangs_work()
for task in running:
    assert task.may_end.wait(TIMEOUT)
deadline = time.monotonic() + TIMEOUT
while not {task.thread.ident for task in running} <= idents(len(threads())):
    assert time.monotonic() < deadline, "a thread that was left to itself is not used again"
assert all(task.has_ended for task in running)
assert not any(task.began.is_set() for task in waiting)
""",
    "nested calls that begin after it start none either": """
def nests(make):
    task()
    return [type(outcome.error) for outcome in make([Task(), Task()]).run_tasks()]


for make in (lambda tasks: Gang(tasks, 2), SerialTasks, lambda tasks: SerialTasks(tasks, tasks)):
    task, found = Task(), []
    afterwards(task.began.wait, ctrl_c, task.may_end.set)
    with interrupted():
        Gang([lambda: found.append(nests(make))], 1).run_tasks()
    assert found == [[Skipped, Skipped]]
""",
    "in the calling thread it is raised where it comes": """
def waits():
    started.append(True)
    signal.raise_signal(signal.SIGINT)
    time.sleep(TIMEOUT)


started, tasks = [], [waits] * 3
first, *others = SerialTasks(tasks, tasks).run_tasks()
assert isinstance(first.error, KeyboardInterrupt)
assert [type(outcome.error) for outcome in others] == [Skipped, Skipped]
assert started == [True]
""",
    "gangs of other threads are left alone": """
others, task, outcomes = Task(), Task(), []
user = afterwards(lambda: outcomes.extend(Gang([others, int], 1).run_tasks()))
assert others.began.wait(TIMEOUT)
afterwards(task.began.wait, ctrl_c, task.may_end.set)
with interrupted():
    Gang([task], 1).run_tasks()
others.may_end.set()
user.join(TIMEOUT)
assert [outcome.error for outcome in outcomes] == [None, None]
""",
}


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    with Ahead(request, tmp_path_factory.mktemp("ahead"), lambda name: Job(PRELUDE + SCRIPTS[name])) as ahead:
        yield ahead


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.ahead(name)) for name in SCRIPTS])
def test_ctrl_c(name: str, printed: str) -> None:
    assert printed == ""
