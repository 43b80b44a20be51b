"""`on_processes`: what ranks are told and return, and how a run ends whose ranks fail."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest
import torch

from dataparallel.testing import Rank, RanksFailed, with_comms
from dataparallel.testing.ranks import comms, on_processes, start

pytestmark = [
    pytest.mark.devices("cpu"),
    pytest.mark.skipif(bool(comms.why_not("gloo")) or not hasattr(os, "fork"), reason="processes with gloo"),
]


def add(rank: Rank, x: torch.Tensor, times: int = 1) -> torch.Tensor:
    x = x * rank.number * times
    torch.distributed.all_reduce(x)
    return x


def test_ranks_talk_and_return_in_order():
    results = on_processes(add, torch.ones(2), ranks=3, times=2)
    assert [result.tolist() for result in results] == [[6, 6]] * 3


def say(rank: Rank) -> dict[str, object]:
    print(f"this is {rank.number}")
    return {
        "rank": (rank.number, rank.count, str(rank.device), rank.place),
        "variables": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MINE")],
        "folder": os.getcwd(),
        "group": torch.distributed.is_initialized(),
        "draws": (torch.rand(1).item(), random.random()),
        "threads": torch.get_num_threads(),
        "stdin": sys.stdin.read(),
        "file": __file__,
        "process": os.getpid(),
        "session": os.getsid(0),
    }


def test_a_rank_is_like_a_new_process_of_this_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MINE", "so")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    first, second = on_processes(say, comms=False)
    assert second["rank"] == (1, 2, "cpu", "processes")
    assert second["variables"] == ["1", "1", "2", "so"]
    assert second["folder"] == str(tmp_path)
    assert not second["group"]
    assert first["draws"] == second["draws"]
    assert second["threads"] == 1
    assert second["stdin"] == ""
    assert second["file"] == __file__
    assert second["session"] == second["process"]  # so that all that it starts can be ended with it
    assert len({first["process"], second["process"], os.getpid()}) == 3
    assert capsys.readouterr().out == "[rank 0] this is 0\n[rank 1] this is 1\n"


FAULTS = {
    "raises": "raised ValueError: on purpose",
    "exits": "left with exit code 3, without a word",
    "leaves": "left with exit code 3, by SystemExit",
    "is_killed": "was killed by SIGKILL",
    "crashes": "was killed by SIGSEGV",
    "hangs": "did not end within",
    "floods": "wrote more than 64 MiB of output",
}


def fail(rank: Rank, fault: str, told: str | None = None) -> None:
    """Rank 1 does it, while the others wait for it in a collective, or sleep if there is no process group."""
    if rank.number == 1:
        if told is not None:
            leave_things(Path(told))
        do(fault)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    else:
        time.sleep(100)


def do(fault: str) -> None:
    if fault == "raises":
        raise ValueError("on purpose")
    if fault == "exits":
        os._exit(3)
    if fault == "leaves":
        sys.exit(3)
    if fault == "is_killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hangs":
        time.sleep(100)
    for _ in range(100):
        os.write(1, b"x" * 2**20)
    time.sleep(100)


def leave_things(told: Path) -> None:
    """Starts processes, opens a port, makes a file and shared memory, and tells where."""
    # One is in this rank's session, one in a session of its own.
    started = [subprocess.Popen(["sleep", "100"], start_new_session=own).pid for own in (False, True)]
    server = socket.create_server(("127.0.0.1", 0))
    _, file = tempfile.mkstemp()
    memory = shared_memory.SharedMemory(create=True, size=8)
    text = json.dumps({"started": started, "port": server.getsockname()[1], "file": file, "memory": memory.name})
    told.write_text(text)


def left(told: Path) -> list[str]:
    """Which of these things are still there."""
    things = json.loads(told.read_text())
    found = [f"process {process}" for process in things["started"] if psutil.pid_exists(process)]
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", things["port"]), 1):
        found.append(f"port {things['port']}")
    if Path(things["file"]).exists():
        found.append(things["file"])
    with contextlib.suppress(FileNotFoundError):
        shared_memory.SharedMemory(things["memory"]).close()
        found.append(f"shared memory {things['memory']}")
    return found


def children() -> set[int]:
    """The processes below this one, without the fork server itself."""
    server = start.server.process
    below = {child.pid for child in psutil.Process().children(recursive=True)}
    return below - ({server.pid} if server is not None else set())


def listening() -> set[int]:
    """The ports that this process and those below it listen at."""
    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found |= {at.laddr.port for at in process.net_connections("inet") if at.status == psutil.CONN_LISTEN}
    return found


def descriptors() -> int:
    return psutil.Process().num_fds()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_that_names_the_rank_and_the_reason(fault):
    began = time.monotonic()
    with pytest.raises(RanksFailed) as raised:
        on_processes(fail, fault, timeout=3 if fault == "hangs" else 30)
    text = str(raised.value)
    assert FAULTS[fault] in text.partition("\n")[0]
    assert time.monotonic() - began < 20
    assert len(text) < 100_000
    if fault == "hangs":
        assert text.startswith("ranks 0, 1 of 2")
        assert " in do\n" in text  # where rank 1 sleeps
        assert " in barrier\n" in text  # where rank 0 waits
    else:
        assert raised.value.rank == 1
        assert text.startswith("rank 1 of 2 (processes)")
        assert "rank 0: " in text
    if fault == "raises":
        assert "in do\n    " in text
        assert "child.py" not in text.partition("rank 0:")[0]  # the traceback begins with the test
    if fault == "crashes":
        assert "Fatal Python error: Segmentation fault" in text


def test_fifty_faulty_runs_leave_nothing(tmp_path, monkeypatch):
    on_processes(add, torch.ones(1))  # the fork server stays
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    kinds = ["raises"] * 13 + ["exits"] * 13 + ["is_killed"] * 12 + ["hangs"] * 8 + ["floods"] * 4
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    before = children(), listening(), descriptors()

    def one(number: int) -> str:
        kind = kinds[number]
        told = str(tmp_path / f"{number}") if number % 6 == 0 else None
        try:
            on_processes(
                fail, kind, told, timeout=2 if kind == "hangs" else 30, comms=kind != "hangs" and number % 2 == 0
            )
        except RanksFailed as error:
            first = str(error).partition("\n")[0]
            right = FAULTS[kind] in first and (kind == "hangs" or error.rank == 1)
            return "" if right else str(error)
        return "has not failed"

    with ThreadPoolExecutor(8) as pool:
        wrong = [found for found in pool.map(one, range(50)) if found]
    assert wrong == []
    remains = {number: left(tmp_path / f"{number}") for number in range(0, 50, 6)}
    assert remains == {number: [] for number in remains}
    assert list((tmp_path / "temporary").iterdir()) == []
    assert (children(), listening(), descriptors()) == before
    until = time.monotonic() + 10  # other processes of this machine have shared memory too
    while shared and not set(os.listdir("/dev/shm")) <= shared and time.monotonic() < until:
        time.sleep(0.1)
    assert not shared or set(os.listdir("/dev/shm")) <= shared


def skip(rank: Rank, how: str) -> None:
    if rank.number == 1:
        if how == "unittest":
            raise unittest.SkipTest("not today")
        getattr(pytest, how)("not today")
    torch.distributed.barrier()


@pytest.mark.parametrize("how", ["unittest", "skip"])
def test_a_skip_in_a_rank_skips_the_test(how):
    with pytest.raises(unittest.SkipTest, match=r"^not today$"):
        on_processes(skip, how)


def test_pytest_outcomes_cross_processes():
    with pytest.raises(pytest.xfail.Exception, match="not today"):
        on_processes(skip, "xfail")
    with pytest.raises(RanksFailed, match=r"rank 1 of 2 .* raised Failed: not today"):
        on_processes(skip, "fail")


def unsendable(rank: Rank) -> object:
    return lambda: rank


def test_a_result_that_cannot_be_sent_is_a_failure_that_says_so():
    with pytest.raises(RanksFailed, match=r"rank [01] of 2 .* returned function, which cannot be sent"):
        on_processes(unsendable, comms=False)


@with_comms(backend="gloo")
def decorated(rank: Rank) -> int:
    x = torch.tensor(rank.number)
    torch.distributed.all_reduce(x)
    return x.item()


def test_with_comms_makes_the_group_of_a_function():
    assert on_processes(decorated, ranks=3, comms=False) == [3, 3, 3]
    assert on_processes(decorated) == [1, 1]


class Nested:
    @staticmethod
    def method(rank: Rank) -> int:
        return rank.number


def test_functions_that_processes_cannot_find_are_refused():
    def inner(rank: Rank) -> None:
        pass

    assert on_processes(Nested.method, comms=False) == [0, 1]
    for function in (inner, lambda rank: None, Nested().method.__get__(3)):
        with pytest.raises(TypeError, match="the ranks look the function up in its module"):
            on_processes(function)
    with pytest.raises(TypeError, match="the arguments of add go to other processes, but cannot be pickled"):
        on_processes(add, lambda: None)


@pytest.mark.parametrize(("arguments", "words"), [({"ranks": 0}, "1 to 100 processes"), ({"timeout": 0}, "seconds")])
def test_numbers_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        on_processes(add, torch.ones(1), **arguments)


@pytest.mark.long
def test_a_server_that_is_gone_is_started_again():
    on_processes(Nested.method, comms=False)
    start.server.process.kill()
    start.server.process.wait()
    assert on_processes(Nested.method, comms=False) == [0, 1]
