"""Tests in ranks in a user's project: under pytest and unittest, in a run that is ended, where torch lacks parts."""

import os
import time
from pathlib import Path

import psutil
import pytest

from dataparallel.testing.ranks import comms
from processes import Ahead, Job, run_pytest

pytestmark = [
    pytest.mark.devices("cpu"),
    pytest.mark.skipif(bool(comms.why_not("gloo")) or not hasattr(os, "fork"), reason="processes with gloo"),
]

TESTS = '''
"""Tests of a user."""

import sys, unittest
import pytest, torch
from dataparallel.testing import ProcessTest, Rank, SlotTest, ThreadTest, run_subtests, skip_unless_devices
from dataparallel.testing import skip_unless_distributed, with_comms

class Sum:  # is sent back by its name
    def __init__(self, value):
        self.value = value

def total(rank, x):
    x = x * (rank.number + 1)
    if rank.place != "slots":
        torch.distributed.all_reduce(x)
    return Sum(x.tolist())

def second_raises(rank):
    if rank.number == 1:
        raise ValueError("on purpose")

@pytest.mark.parametrize("place", ["on_slots", "on_threads", "on_processes"])
def test_places(request, place):
    results = request.getfixturevalue(place)(total, torch.ones(1), ranks=2)
    assert [result.value for result in results] == ([[1.0]] if place == "on_slots" else [[3.0], [3.0]])

def test_second_raises(on_processes):
    on_processes(second_raises)

class Processes(ProcessTest):
    timeout = 50.0

    @classmethod
    def setUpClass(cls):
        cls.made = "in setUpClass"

    def setUp(self):
        self.mine = torch.tensor(self.rank)
        self.addCleanup(print, "cleaned up")

    def tearDown(self):
        assert self.mine is not None

    @skip_unless_distributed
    @with_comms
    def test_all(self):
        torch.distributed.all_reduce(self.mine)
        self.assertEqual((self.mine.item(), self.world_size, self.made), (1, 2, "in setUpClass"))
        self.assertEqual((self.device, self.device_type), (torch.device("cpu"), "cpu"))
        self.assertEqual(self.build_device_mesh().size(), 2)
        self.run_subtests({"a": [1, 2], "b": [3]}, self.subtest)

    def subtest(self, a, b):
        self.assertLess(a, b)

    def test_second_fails(self):
        self.assertEqual(self.rank, 0)

    def test_skips(self):
        self.skipTest("not today")

    @skip_unless_devices(64)
    def test_large(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.fail()

    @unittest.skip("never")
    def test_never(self):
        pass

class Threads(ThreadTest):
    world_size = 3

    def setUp(self):
        self.mine = torch.tensor(self.rank)

    @with_comms
    def test_all(self):
        torch.distributed.all_reduce(self.mine)
        self.assertEqual((self.mine.item(), self.world_size), (3, 3))

    def test_second_fails(self):
        self.assertNotEqual(self.rank, 1)

class Slots(SlotTest):
    world_size = 3

    @with_comms
    def test_all(self):
        self.assertEqual(self.devices, [torch.device("cpu")] * 3)

    def test_fails(self):
        self.fail("on purpose")

if __name__ == "__main__":
    unittest.main()
'''

ENDS = """
import os, sys, time, signal, threading
from pathlib import Path
from dataparallel.testing.ranks import on_processes, start

folder = Path(sys.argv[1])

def sleeps(rank, name):
    (folder / f"{name}{rank.number}").write_text(str(os.getpid()))
    time.sleep(100)

def end(name, number):
    while not all((folder / f"{name}{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    time.sleep(0.2)
    (folder / f"{name}server").write_text(str(start.server.process.pid))
    os.kill(os.getpid(), number)

def end_while_running(name, number):
    threading.Thread(target=end, args=(name, number), daemon=True).start()
    on_processes(sleeps, name, comms=False)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        end_while_running("first", signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
    for rank in range(2):
        try:
            os.kill(int((folder / f"first{rank}").read_text()), 0)
            print("still there", rank)
        except ProcessLookupError:
            pass
    sys.stdout.flush()
    end_while_running("second", signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def processes(request, tmp_path_factory):
    def project(kind: str, *arguments: str) -> Job:
        folder = tmp_path_factory.mktemp("project")
        if kind == "script":
            (folder / "script.py").write_text(arguments[0])
            start = "import runpy; runpy.run_path('script.py', run_name='__main__')"
            (folder / "temporary").mkdir()
            return Job(start, [str(folder)], folder, {"TMPDIR": str(folder / "temporary")})
        (folder / "some").mkdir()
        (folder / "some" / "test_user.py").write_text(TESTS)
        if kind == "unittest":
            script = "import runpy; runpy.run_module('unittest', run_name='__main__', alter_sys=True)"
            return Job(script, arguments, folder / "some")
        (folder / "conftest.py").write_text('pytest_plugins = ["dataparallel.testing.pytest"]\n')
        (folder / "pytest.ini").write_text("[pytest]\n")
        return run_pytest(folder, "-rs", *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    with Ahead(request, tmp_path_factory.mktemp("ahead"), project) as ahead:
        yield ahead


@pytest.mark.ahead("pytest", "--import-mode=importlib")
def test_pytest_with_importlib(result):
    result.assert_outcomes(passed=6, failed=4, skipped=3, xfailed=1)
    result.stdout.fnmatch_lines_random(
        [
            "E *RanksFailed: rank 1 of 2 (processes) raised ValueError: on purpose, after*",
            "E *RanksFailed: rank 1 of 2 (processes) raised AssertionError: 1 != 0, after*",
            "E *RanksFailed: rank 1 of 3 (threads) raised AssertionError: 1 == 1, after*",
            "SKIPPED*not today*",
            "SKIPPED*for 64 accelerators; there are 0*",
        ]
    )
    assert "on_processes.py" not in result.stdout.str()


@pytest.mark.ahead("unittest", "test_user", "-v")
def test_unittest(done):
    assert done.returncode == 1, done.stderr
    assert "Ran 10 tests" in done.stderr
    assert "FAILED (failures=3, skipped=3, expected failures=1)" in done.stderr
    assert done.stderr.count("rank 1 of 2 (processes) raised AssertionError: 1 != 0") == 1


@pytest.mark.ahead("script", ENDS)
def test_ranks_and_server_end_with_the_test_run_however_it_ends(done):
    assert done.returncode == -9, done.stderr
    assert done.stdout == "interrupted\n"
    folder = Path(done.args.folder)
    gone = [int((folder / f"second{name}").read_text()) for name in ("0", "1", "server")]
    until = time.monotonic() + 10
    while any(map(psutil.pid_exists, gone)) and time.monotonic() < until:
        time.sleep(0.05)
    assert [process for process in gone if psutil.pid_exists(process)] == []
    assert list((folder / "temporary").iterdir()) == []
