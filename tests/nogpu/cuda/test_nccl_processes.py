"""The stand-in for NCCL between processes, called by ctypes: values, who waits for whom, and what it refuses."""

from pathlib import Path

import pytest

from processes import run_ranks
from stand_in import IN_OWN_PROCESSES, programs

pytestmark = [*IN_OWN_PROCESSES, pytest.mark.usefixtures("compiled_libraries")]

START = """
import sys, time
from nccl_calls import *
comm, other = join(shared_id("first")), join(shared_id("second"))
x = Buffer([RANK + 1.0] * 4, RANK)
call_out = lambda function: print("error:", said(function))
send = lambda b, peer: nccl("ncclSend", b.pointer, N(b.count), b.dtype, peer, comm, b.stream)
receive = lambda b, peer: nccl("ncclRecv", b.pointer, N(b.count), b.dtype, peer, comm, b.stream)
"""


def ranks(folder: Path, count: int, script: str, *, start: str = START, **changes: str) -> list[str]:
    """Runs a script in as many processes at once, and returns what they print. Fails if one of them fails."""
    done = run_ranks(folder, count, start + script, **changes)
    assert not any(each.returncode for each in done), "\n".join(each.stdout for each in done)
    return [each.stdout for each in done]


OF_TWO = """
#: the host goes on while a collective waits
import os
from pathlib import Path
from cudart import CUDA
flag = Path(os.environ["TEST_FOLDER"], "flag")
y = Buffer([0] * 4, RANK)
if RANK == 0:
    all_reduce(comm, x)  # rank 1 does not come before the file is there
    assert CUDA.cudaStreamQuery(x.stream) == 600
    assert y.get() == [0] * 4  # other streams go on
    flag.touch()
else:
    while not flag.exists():
        time.sleep(0.01)
    all_reduce(comm, x)
assert x.get() == [3] * 4
#: collectives after one another on a stream use its values
if RANK == 1:
    time.sleep(0.3)  # rank 0 is ahead by four calls, on two communicators
for turn in range(4):
    all_reduce(comm if turn % 2 else other, x)
assert x.get() == [3 * 2**3] * 4
"""
OF_THREE = """
#: sends around a ring in groups
y = Buffer([0] * 4, RANK)
y.stream = x.stream
for _ in range(20):
    group(lambda: send(x, (RANK + 1) % 3), lambda: receive(y, (RANK - 1) % 3))
assert y.get() == [(RANK - 1) % 3 + 1] * 4
#: the process that made the id waits for the others at its end
if RANK == 0:
    sys.exit()
for _ in range(200):
    send(x, 3 - RANK) if RANK == 1 else receive(x, 3 - RANK)
    x.get()
assert x.get() == [2] * 4
"""


@programs(OF_TWO)
def test_two_ranks(tmp_path, program):
    ranks(tmp_path, 2, program)


@programs(OF_THREE)
def test_three_ranks(tmp_path, program):
    ranks(tmp_path, 3, program)


def test_a_device_may_not_be_in_two_processes(tmp_path):
    ranks(
        tmp_path,
        2,
        """
unique = shared_id("first")
refused("ncclInvalidUsage", "Duplicate GPU detected", join, unique, 2, RANK, 0)
time.sleep(0.5)  # the one that made the id tells the other
""",
        start="import time\nfrom nccl_calls import *\n",
    )


# Each process is told in one of its calls, or where its host waits for what it has launched: who comes first decides.
CIRCLES = {
    "a ring of sends": (
        3,
        """
call_out(lambda: (send(x, (RANK + 1) % 3), receive(x, (RANK - 1) % 3), x.get()))
""",
    ),
    "a send and a collective": (
        2,
        """
calls = [lambda: send(x, 1) if RANK == 0 else receive(x, 0), lambda: all_reduce(comm, x)]
call_out(lambda: ([call() for call in calls[:: 1 - 2 * RANK]], x.get()))
""",
    ),
}


@pytest.mark.parametrize("name", CIRCLES)
def test_circles_are_refused_at_once(tmp_path, name):
    count, script = CIRCLES[name]
    for text in ranks(tmp_path, count, script):
        assert "error:" in text, text
        assert "wait for each other in a circle" in text, text


def test_different_calls_are_refused_on_all_ranks(tmp_path):
    texts = ranks(
        tmp_path,
        3,
        """
try:
    all_reduce(comm, Buffer([1] * 5, RANK) if RANK == 1 else x, on=x.stream)
except Failed:
    pass
try:
    x.get()
    all_reduce(comm, x)  # the one that was told in the call has nothing on its stream
except Exception as error:
    print(error)
""",
    )
    for text in texts:
        assert "differ in their calls' counts: where rank" in text, text
        assert "sum of 5 float32" in text, text


def test_a_rank_that_does_not_come_is_named(tmp_path):
    texts = ranks(
        tmp_path,
        3,
        """
all_reduce(comm, x)
x.get()
if RANK == 2:
    time.sleep(4)
else:
    all_reduce(other, x)
    call_out(x.get)
""",
        NOGPU_NCCL_SECONDS="2",
    )
    for text in texts[:2]:
        assert "after 2 seconds ncclAllReduce(sum of 4 float32) is not complete: it misses rank 2 (cuda:2" in text, text


def test_a_process_that_ends_is_named(tmp_path):
    texts = ranks(
        tmp_path,
        3,
        """
import os
try:
    all_reduce(comm, x)
    x.get()  # another rank may have met the end of rank 1 already
    if RANK == 1:
        os._exit(0)
    all_reduce(comm, x)
    x.get()
except Exception as error:
    print("error:", error)
time.sleep(0.3)
""",
    )
    for text in (texts[0], texts[2]):
        assert "rank 1 (cuda:1" in text, text
        assert "has ended" in text, text
