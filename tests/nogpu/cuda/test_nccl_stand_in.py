"""The stand-in for NCCL in one process, called by ctypes: values, groups, threads, and what it refuses."""

import pytest

from processes import run_script
from stand_in import IN_OWN_PROCESSES, programs

pytestmark = [*IN_OWN_PROCESSES, pytest.mark.usefixtures("compiled_libraries")]

START = "from nccl_calls import *\n"


PROGRAMS = """
#: sums products extremes and averages of all dtypes
import math
comms = communicators(0, 2, 5)
terms = [[1, 2, 3], [5, 1, 9], [4, 7, 0]]
expected = [[sum(t) for t in zip(*terms)], [math.prod(t) for t in zip(*terms)], [max(t) for t in zip(*terms)],
            [min(t) for t in zip(*terms)]]
for code in "bBiIqQfd":
    for op, right in enumerate(expected):
        buffers = [Buffer(t, d, code) for t, d in zip(terms, (0, 2, 5))]
        group(*[lambda c=c, b=b: all_reduce(c, b, op) for c, b in zip(comms, buffers)])
        assert all(b.get() == right for b in buffers), (code, op)
    buffers = [Buffer([3 * v for v in t], d, code) for t, d in zip(terms, (0, 2, 5))]
    group(*[lambda c=c, b=b: all_reduce(c, b, 4) for c, b in zip(comms, buffers)])
    assert all(b.get() == expected[0] for b in buffers), code
#: small floats are added in float32 and rounded once
import struct
half = lambda value: struct.unpack("h", struct.pack("e", value))[0]  # of int16, as the array cannot hold halves
comms = communicators(0, 1, 2)
buffers = [Buffer([v & 255, v >> 8 & 255], d, "B") for d, v in enumerate(map(half, (2048.0, 1.0, 1.0)))]
group(*[lambda c=c, b=b: nccl("ncclAllReduce", b.pointer, b.pointer, N(1), 6, 0, c, b.stream)
        for c, b in zip(comms, buffers)])
assert struct.unpack("e", bytes(buffers[1].get()))[0] == 2050.0  # 2048 in float16: 2048 + 1 is 2048
brain = [Buffer([0x80, 0x3F], d, "B") for d in range(3)]  # 1.0
group(*[lambda c=c, b=b: nccl("ncclAllReduce", b.pointer, b.pointer, N(1), 9, 0, c, b.stream)
        for c, b in zip(comms, brain)])
assert brain[2].get() == [0x40, 0x40]  # 3.0
for dtype, one, three in ((10, 0x38, 0x44), (11, 0x3C, 0x42)):
    tiny = [Buffer([one], d, "B") for d in range(3)]
    group(*[lambda c=c, b=b: nccl("ncclAllReduce", b.pointer, b.pointer, N(1), dtype, 0, c, b.stream)
            for c, b in zip(comms, tiny)])
    assert tiny[0].get() == [three], (dtype, tiny[0].get())
#: collectives that torch does not use
comms = communicators(0, 1, 2)
def each(values, function):
    buffers = [(Buffer(v, d), Buffer([0] * 6, d)) for d, v in enumerate(values)]
    group(*[lambda c=c, s=s, r=r: function(c, s, r) for c, (s, r) in zip(comms, buffers)])
    return [r.get(s.stream) for s, r in buffers]
two = [[1, 2], [3, 4], [5, 6]]
six = [[10 * r + i for i in range(6)] for r in range(3)]
run = lambda name, *rest: lambda c, s, r: nccl(name, s.pointer, r.pointer, N(2), 7, *rest, c, s.stream)
assert each(six, run("ncclAlltoAll")) == [[v for s in range(3) for v in (10 * s + 2 * r, 10 * s + 2 * r + 1)]
                                          for r in range(3)]
assert each(two, run("ncclGather", 1)) == [[0] * 6, [1, 2, 3, 4, 5, 6], [0] * 6]
assert each(six, run("ncclScatter", 2)) == [[20 + 2 * r, 21 + 2 * r, 0, 0, 0, 0] for r in range(3)]
#: sends and multiples
import ctypes
comms = communicators(0, 1)
a, b = Buffer([1, 2], 0), Buffer([0, 0], 1)
group(lambda: nccl("ncclSend", a.pointer, N(2), 7, 1, comms[0], a.stream),
      lambda: nccl("ncclRecv", b.pointer, N(2), 7, 0, comms[1], b.stream))
assert b.get() == [1, 2]
ops = []
for comm, factor in zip(comms, (2.0, 10.0)):
    op, value = ctypes.c_int(), ctypes.c_float(factor)
    nccl("ncclRedOpCreatePreMulSum", ctypes.byref(op), ctypes.byref(value), 7, 1, comm)
    ops.append(op.value)
group(*[lambda c=c, x=x, o=o: all_reduce(c, x, o) for c, x, o in zip(comms, (a, b), ops)])
assert a.get() == b.get() == [12, 24]
nccl("ncclRedOpDestroy", ops[0], comms[0])
refused("ncclInvalidArgument", "destroyed", all_reduce, comms[0], a, ops[0])
#: ranks in threads split and what communicators say
import ctypes, threading
unique, seen, failed = new_id(), {}, []
def work(rank):
    try:
        comm, x = join(unique, 3, rank, rank), Buffer([rank + 1], rank)
        for _ in range(5):
            all_reduce(comm, x)
        half = P()
        nccl("ncclCommSplit", comm, rank % 2, -rank, ctypes.byref(half), None)
        numbers = []
        for name in ("ncclCommCount", "ncclCommUserRank", "ncclCommCuDevice"):
            number = ctypes.c_int()
            nccl(name, half, ctypes.byref(number))
            numbers.append(number.value)
        all_reduce(half, x)
        seen[rank] = (x.get(), numbers)
        nccl("ncclCommDestroy", half)
        nccl("ncclCommDestroy", comm)
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
total = 6 * 3**4
assert seen == {0: ([2 * total], [2, 1, 0]), 1: ([total], [1, 0, 1]), 2: ([2 * total], [2, 0, 2])}, seen
"""


@programs(PROGRAMS)
def test_program(program):
    run_script(START + program)


REFUSED = """
#: twice the same device
refused("ncclInvalidUsage", "Duplicate GPU detected : rank 0 and rank 2 both on CUDA device 1", communicators, 1, 3, 1)
#: one thread without a group
all_reduce(comms[0], a)
refused("ncclInvalidUsage", "outside of one group", all_reduce, comms[1], b)
assert "comes after a collective that has failed" in said(a.get)
abort(*comms)
assert a.get() == [1, 2]  # the stream is of use again
#: memory of another device
refused("ncclInvalidArgument", "is memory of cuda:1, and the rank's device is cuda:0", all_reduce, comms[0], b)
#: beyond an allocation
refused("ncclInvalidArgument", "its allocation ends after 8", nccl, "ncclAllReduce", a.pointer, a.pointer, N(3), 7, 0,
        comms[0], a.stream)
#: a stream of another device
refused("ncclInvalidArgument", "the stream belongs to cuda:1", all_reduce, comms[0], a, 0, b.stream)
#: a communicator that was destroyed
nccl("ncclCommDestroy", comms[0])
refused("ncclInvalidArgument", "was destroyed", all_reduce, comms[0], a)
#: a second thread within a group
import threading
told = []
nccl("ncclGroupStart")
all_reduce(comms[0], a)
thread = threading.Thread(target=lambda: told.append(said(all_reduce, comms[0], a)))
thread.start(); thread.join()
assert told[0].startswith("ncclInvalidUsage: ") and "one thread at a time" in told[0], told
"""


@programs(REFUSED)
def test_refused(program):
    run_script(START + "comms, a, b = communicators(0, 1), Buffer([1, 2], 0), Buffer([3, 4], 1)\n" + program)


def test_launches_of_two_threads_on_two_devices_at_once_are_refused():
    run_script(
        START
        + """
import threading
told = []
def launch(comms):
    buffers = [Buffer([1], 0), Buffer([1], 1)]
    start.wait()
    try:
        group(*[lambda c=c, b=b: all_reduce(c, b) for c, b in zip(comms, buffers)])
    except Failed as failed:
        told.append(str(failed))
start = threading.Barrier(2)
pairs = communicators(0, 1), communicators(0, 1)
threads = [threading.Thread(target=launch, args=(pair,)) for pair in pairs]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(told) == 1 and "two threads launch collectives on cuda:0 and cuda:1 at the same time" in told[0], told
""",
        NOGPU_NCCL_LAUNCH_SECONDS="0.3",
    )


def test_a_rank_that_does_not_join_is_named():
    text = """
refused("ncclRemoteError", "it misses rank 1; there were rank 0 (cuda:0 of process", join, new_id(), 2, 0, 0)
"""
    run_script(START + text, NOGPU_NCCL_SECONDS="1")
