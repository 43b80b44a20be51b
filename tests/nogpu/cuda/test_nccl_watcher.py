"""What a watcher hears of collectives of the stand-in for NCCL: what they touch, and the order that NCCL promises."""

import pytest

from processes import run_script
from stand_in import IN_OWN_PROCESSES, programs

pytestmark = [*IN_OWN_PROCESSES, pytest.mark.usefixtures("compiled_libraries")]

START = """
from cudart import CUDA, Log, after
from nccl_calls import *
log = Log()
comms = communicators(0, 1)
a, b = Buffer([1, 2], 0), Buffer([3, 4], 1)
import ctypes
def name(stream, device):
    number = ctypes.c_ulonglong()
    assert CUDA.cudaStreamGetId(stream, ctypes.byref(number)) == 0
    return f"{device}/{number.value & 0xffffffff}"
A, B = name(a.stream, 0), name(b.stream, 1)
def heard(*calls):
    log.lines()
    group(*calls)
    return log.lines()
def later(x):  # what comes before the next work on its stream
    log.lines()
    x.get()
    lines = log.lines()
    return [line for line in lines[:[line.startswith("cudaMemcpyAsync") for line in lines].index(True)]]
both = lambda f: (lambda: f(comms[0], a), lambda: f(comms[1], b))
"""


PROGRAMS = """
#: a sum is one launch on each stream and later work is after what the others had
lines = heard(*both(all_reduce))
assert lines == [f"recorded on {A}", f"recorded on {B}",
                 f"ncclAllReduce on {A} reads sendbuff of 0 [0, 8) writes recvbuff of 0 [0, 8)",
                 f"ncclAllReduce on {B} reads sendbuff of 1 [0, 8) writes recvbuff of 1 [0, 8)"], lines
assert f"{A} waits for event of {B}" in later(a) and f"{B} waits for event of {A}" in later(b)
#: receivers of a broadcast come after the root and the root after nobody
run = lambda c, x: nccl("ncclBroadcast", x.pointer, x.pointer, N(2), 7, 0, c, x.stream)
lines = heard(*both(run))
assert f"ncclBroadcast on {A} reads sendbuff of 0 [0, 8)" in lines  # and does not write it: in place
assert f"ncclBroadcast on {B} writes recvbuff of 1 [0, 8)" in lines
assert f"{B} waits for event of {A}" in lines and f"{A} waits for event of {B}" not in lines + later(a)
#: a sender does not come after the receiver
lines = heard(lambda: nccl("ncclSend", a.pointer, N(2), 7, 1, comms[0], a.stream),
              lambda: nccl("ncclRecv", b.pointer, N(2), 7, 0, comms[1], b.stream))
assert lines.index(f"{B} waits for event of {A}") < lines.index(f"ncclRecv on {B} writes recvbuff of 1 [0, 8)")
assert f"{A} waits for event of {B}" not in lines + later(a)
#: calls of a group are one launch and all its streams wait
second = stream(0)
S = name(second, 0)
more = Buffer([5], 0), Buffer([6], 1)
lines = heard(*both(all_reduce), lambda: all_reduce(comms[0], more[0], on=second),
              lambda: all_reduce(comms[1], more[1], on=b.stream))
launches = [line for line in lines if line.startswith("nccl")]
assert len(launches) == 2 and launches[0].count("reads") == launches[0].count("writes") == 2, lines
assert lines.index(f"{A} waits for {S}") < lines.index(launches[0]) < lines.index(f"{S} waits for {A}")
#: a race stops the call and leaves the communicators of use
log.library.log_refuse(b"a race")
refused("ncclUnhandledCudaError", "a race", group, *both(all_reduce))
log.library.log_refuse(b"")
group(*both(all_reduce))
assert a.get() == b.get() == [4, 6]
"""


@programs(PROGRAMS)
def test_program(program):
    run_script(START + program)
