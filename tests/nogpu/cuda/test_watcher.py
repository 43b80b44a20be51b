"""What the stand-in for CUDA's runtime tells a watcher: launches, order, and where the host waits."""

import pytest

from processes import run_script
from stand_in import IN_OWN_PROCESSES, programs

pytestmark = [*IN_OWN_PROCESSES, pytest.mark.usefixtures("compiled_libraries")]

# Streams are numbered in the order in which they are made. The first is 1.
START = """
from cudart import *
log = Log()
def told(*arguments):
    log.lines()
    call(*arguments)
    return log.lines()
"""


PROGRAMS = """
#: launches with their memory
call("cudaSetDevice", 1)
stream = made("cudaStreamCreateWithFlags", NON_BLOCKING)
memory, pinned = malloc(64, 1), made("cudaMallocHost", N(64))
assert log.lines() == ["allocated 64 of 1", "allocated 64 of -1"]
assert told("cudaMemcpyAsync", after(memory, 8), after(pinned, 4), N(16), TO_DEVICE, stream) == [
    "cudaMemcpyAsync on 1/1 reads source of -1 [4, 20) writes destination of 1 [8, 24) copies 16 from -1 to 1"]
assert told("cudaMemsetAsync", after(memory, 8), 1, N(16), stream) == [
    "cudaMemsetAsync on 1/1 writes destination of 1 [8, 24)"]
assert told("cudaMemcpy2DAsync", memory, N(32), pinned, N(8), N(8), N(2), ANY, stream) == [
    "cudaMemcpy2DAsync on 1/1 reads source of -1 [0, 16) writes destination of 1 [0, 8)"
    " writes destination of 1 [32, 40) copies 16 from -1 to 1"]
assert told("cudaMemcpyAsync", memory, pinned, N(0), ANY, stream) == []
#: where copies make the host wait
stream = made("cudaStreamCreateWithFlags", NON_BLOCKING)
memory, other, pinned = malloc(4, 0), malloc(4, 1), made("cudaMallocHost", N(4))
call("cudaSetDevice", 0)
pageable = ctypes.create_string_buffer(4)
def waits(*arguments):
    before = libraries.counts().host_waits
    lines = [line.split(" writes")[0].split(" reads")[0].split(" copies")[0] for line in told(*arguments)]
    assert libraries.counts().host_waits - before == sum("waits" in line for line in lines)
    return [" ".join(line.split()[1:]) for line in lines]
def asynchronous(to, source):
    return waits("cudaMemcpyAsync", to, source, N(4), ANY, stream)
def synchronous(to, source):
    return waits("cudaMemcpy", to, source, N(4), ANY)
assert asynchronous(memory, pageable) == ["on 0/1"]
assert asynchronous(pageable, memory) == ["on 0/1", "waits for 0/1"]
assert asynchronous(pinned, memory) == asynchronous(memory, pinned) == asynchronous(other, memory) == ["on 0/1"]
assert asynchronous(pinned, pageable) == ["on 0/1", "waits for 0/1"]
assert synchronous(memory, pageable) == ["waits for 0/0", "on 0/0"]
assert synchronous(pageable, memory) == synchronous(pinned, memory) == ["on 0/0", "waits for 0/0"]
assert synchronous(memory, pinned) == ["on 0/0", "waits for 0/0"]
assert synchronous(other, memory) == ["on 0/0"]
assert waits("cudaMemset", memory, 0, N(4)) == ["on 0/0"]
assert waits("cudaMemset", pinned, 0, N(4)) == ["on 0/0", "waits for 0/0"]
#: waits of the host
stream = made("cudaStreamCreateWithFlags", NON_BLOCKING)
event = made("cudaEventCreate")
assert told("cudaEventSynchronize", event) == []
call("cudaEventRecord", event, stream)
assert told("cudaEventSynchronize", event) == ["cudaEventSynchronize waits for event of 0/1"]
assert told("cudaStreamSynchronize", stream) == ["cudaStreamSynchronize waits for 0/1"]
assert told("cudaDeviceSynchronize") == ["cudaDeviceSynchronize waits for device 0"]
memory, pinned = malloc(4, 1), made("cudaMallocHost", N(8))
call("cudaSetDevice", 0)
assert told("cudaFree", memory) == ["cudaFree waits for device 1", "freed 4 of 1"]
assert told("cudaFreeHost", pinned) == ["cudaFreeHost waits for device 1", "freed 8 of -1"]
assert libraries.counts().host_waits == 5
libraries.forget_counts()
assert libraries.counts().host_waits == 0
#: events
first, second = made("cudaStreamCreateWithFlags", NON_BLOCKING), made("cudaStreamCreateWithFlags", NON_BLOCKING)
event = made("cudaEventCreateWithFlags", NO_TIMING)
assert told("cudaStreamWaitEvent", second, event, 0) == []
assert told("cudaEventRecord", event, first) == ["recorded on 0/1"]
assert told("cudaStreamWaitEvent", second, event, 0) == ["0/2 waits for event of 0/1"]
assert told("cudaEventQuery", event) == ["asks for event of 0/1"]
assert told("cudaEventRecord", event, second) == ["forgets an event", "recorded on 0/2"]
assert told("cudaEventDestroy", event) == ["forgets an event"]
assert told("cudaEventDestroy", made("cudaEventCreate")) == []
assert told("cudaStreamQuery", second) == ["asks for 0/2"]
#: the legacy default stream waits and is waited for
memory = malloc(4)
made("cudaStreamCreateWithFlags", NON_BLOCKING)
blocking, other = made("cudaStreamCreate"), made("cudaStreamCreate")
fill = lambda stream: [line.split(" writes")[0] for line in told("cudaMemsetAsync", memory, 0, N(4), stream)]
work = lambda stream: f"cudaMemsetAsync on 0/{stream}"
assert fill(None) == [work(0)]
assert fill(blocking) == ["0/2 waits for 0/0", work(2)]
assert fill(blocking) == [work(2)]
assert fill(LEGACY) == ["0/0 waits for 0/2", work(0)]
assert fill(None) == [work(0)]
assert fill(PER_THREAD) == ["0/4 waits for 0/0", work(4)]
assert fill(other) == ["0/3 waits for 0/0", work(3)]
event = made("cudaEventCreate")
assert told("cudaEventRecord", event, None) == ["0/0 waits for 0/3", "0/0 waits for 0/4", "recorded on 0/0"]
assert fill(other) == ["0/3 waits for 0/0", work(3)]
call("cudaStreamDestroy", other)  # what it has is still waited for
assert told("cudaStreamSynchronize", None) == ["0/0 waits for 0/3", "cudaStreamSynchronize waits for 0/0"]
unordered = made("cudaStreamCreateWithFlags", NON_BLOCKING)
assert fill(unordered) == [work(5)]
assert fill(None) == [work(0)]
there = malloc(4, 1)
assert told("cudaMemset", there, 0, N(4)) == ["cudaMemset on 1/0 writes destination of 1 [0, 4)"]
#: functions of the host between work
stream = made("cudaStreamCreateWithFlags", NON_BLOCKING)
results = []
Function = ctypes.CFUNCTYPE(None, P)
function = Function(lambda argument: results.append((argument, CUDA.cudaFree(None))))
lines = told("cudaLaunchHostFunc", stream, function, P(5))
assert lines == ["host function begins on 0/1", "host function ends on 0/1"]
assert results == [(5, 800)]  # it may not call CUDA
call("cudaFree", None)
#: many threads
import threading
def work(device):
    for _ in range(200):
        memory, stream, event = malloc(64, device), made("cudaStreamCreate"), made("cudaEventCreate")
        call("cudaMemsetAsync", memory, device, N(64), stream)
        call("cudaEventRecord", event, stream)
        call("cudaStreamWaitEvent", None, event, 0)
        assert read(memory, 64) == bytes([device] * 64)
        call("cudaEventDestroy", event)
        call("cudaStreamDestroy", stream)
        call("cudaFree", memory)
    done.append(device)
done = []
threads = [threading.Thread(target=work, args=(index % 8,)) for index in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(done) == 12
"""


@programs(PROGRAMS)
def test_program(program):
    run_script(START + program)
