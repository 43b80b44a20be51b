"""The stand-in for CUDA's runtime, called by ctypes in processes of their own: it answers and refuses as CUDA does.

torch runs on it too, here without operators.
"""

import signal

import pytest

from processes import run, run_script
from stand_in import IN_OWN_PROCESSES, programs

pytestmark = [*IN_OWN_PROCESSES, pytest.mark.usefixtures("compiled_libraries")]

START = "from cudart import *\n"


def script(text: str, **changes: str) -> str:
    return run_script(START + text, **changes)


PROGRAMS = """
#: devices and what they say of themselves
assert number("cudaGetDeviceCount") == 8 and number("cudaGetDevice") == 0
assert number("cudaDeviceGetAttribute", 75, 3) == 8  # of the compute capability
bus = ctypes.create_string_buffer(16)
call("cudaDeviceGetPCIBusId", bus, 16, 5)
assert number("cudaDeviceGetByPCIBusId", bus) == 5
assert refused("cudaErrorInvalidDevice", "cudaSetDevice", 8) == "invalid device ordinal"
refused("cudaErrorInvalidDevice", "cudaDeviceGetAttribute", P(), 75, -1)
assert not libraries.counts().contexts
#: memory has a limit
libraries.set_capacity(1, 1 << 20)
first = malloc(1 << 19, 1)
free, total = N(), N()
call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
assert (free.value, total.value) == (1 << 19, 1 << 20)
assert refused("cudaErrorMemoryAllocation", "cudaMalloc", ctypes.byref(P()), N((1 << 19) + 1)) == "out of memory"
second = made("cudaMalloc", N(1 << 19))
call("cudaFree", first)
call("cudaFree", made("cudaMalloc", N(1 << 19)))
assert made("cudaMalloc", N(0)).value is None
call("cudaFree", None)
refused("cudaErrorInvalidValue", "cudaFree", first)
refused("cudaErrorInvalidValue", "cudaFree", after(second, 512))
refused("cudaErrorInvalidValue", "cudaFreeHost", second)
refused("cudaErrorInvalidValue", "cudaFree", made("cudaMallocHost", N(16)))
malloc(1 << 36, 0)  # memory that nobody touches costs nothing
#: addresses of freed memory are not given out again
seen = set()
for _ in range(2000):
    memory = malloc(1 << 30)
    assert memory.value not in seen
    seen.add(memory.value)
    call("cudaFree", memory)
#: copies are checked
here, there = malloc(64, 0), malloc(64, 1)
buffer = ctypes.create_string_buffer(bytes(range(64)), 64)
call("cudaMemcpy", here, buffer, N(64), TO_DEVICE)
call("cudaMemcpyPeerAsync", there, 1, here, 0, N(64), None)
assert read(there, 64) == bytes(range(64))
call("cudaMemset", after(there, 60), 255, N(4))
call("cudaMemcpy2DAsync", after(here, 8), N(16), there, N(32), N(4), N(2), ANY, None)
assert read(here, 32) == bytes([*range(8), *range(4), *range(12, 24), 32, 33, 34, 35, 28, 29, 30, 31])
invalid = lambda *arguments: refused("cudaErrorInvalidValue", *arguments)
invalid("cudaMemcpy", here, buffer, N(65), TO_DEVICE)
invalid("cudaMemcpy", after(here, 1), buffer, N(64), TO_DEVICE)
invalid("cudaMemcpy", buffer, here, N(64), TO_DEVICE)
invalid("cudaMemcpy", there, here, N(64), TO_HOST)
invalid("cudaMemcpy", buffer, buffer, N(64), BETWEEN_DEVICES)
invalid("cudaMemcpyPeerAsync", there, 0, here, 1, N(64), None)
invalid("cudaMemsetAsync", there, 0, N(65), None)
invalid("cudaMemset", buffer, 0, N(1))
invalid("cudaMemset", here, 0, N(1))  # the current device is the other one, which has not mapped it
refused("cudaErrorInvalidMemcpyDirection", "cudaMemcpy", here, buffer, N(64), 9)
refused("cudaErrorInvalidPitchValue", "cudaMemcpy2D", here, N(2), there, N(32), N(4), N(2), ANY)
refused("cudaErrorInvalidDevice", "cudaMemcpyPeer", there, 8, here, 0, N(64))
call("cudaMemcpy", None, None, N(0), ANY)
#: where copies make the host wait
stream = made("cudaStreamCreateWithFlags", NON_BLOCKING)
memory, other, pinned = malloc(4, 0), malloc(4, 1), made("cudaMallocHost", N(4))
call("cudaSetDevice", 0)
pageable = ctypes.create_string_buffer(4)
def waits(*arguments):
    before = libraries.counts().host_waits
    call(*arguments)
    return libraries.counts().host_waits - before
def asynchronous(to, source):
    return waits("cudaMemcpyAsync", to, source, N(4), ANY, stream)
def synchronous(to, source):
    return waits("cudaMemcpy", to, source, N(4), ANY)
assert asynchronous(pinned, memory) == asynchronous(memory, pinned) == asynchronous(other, memory) == 0
assert asynchronous(memory, pageable) == 0 and asynchronous(pageable, memory) == asynchronous(pinned, pageable) == 1
assert synchronous(memory, pageable) == synchronous(pageable, memory) == synchronous(pinned, memory) == 1
assert synchronous(memory, pinned) == 1 and synchronous(other, memory) == 0
assert waits("cudaMemset", memory, 0, N(4)) == 0 and waits("cudaMemset", pinned, 0, N(4)) == 1
assert waits("cudaFree", memory) == waits("cudaFreeHost", pinned) == waits("cudaDeviceSynchronize") == 1
#: peers
libraries.set_link(0, 2, "missing")
libraries.set_link(0, 3, "broken")
memory = {device: malloc(4, device) for device in (1, 2, 3, 0)}
assert [number("cudaDeviceCanAccessPeer", 0, peer) for peer in range(4)] == [0, 1, 0, 1]
assert number("cudaDeviceCanAccessPeer", 2, 0) == 1
call("cudaDeviceEnablePeerAccess", 1, 0)
refused("cudaErrorPeerAccessAlreadyEnabled", "cudaDeviceEnablePeerAccess", 1, 0)
refused("cudaErrorPeerAccessUnsupported", "cudaDeviceEnablePeerAccess", 2, 0)
refused("cudaErrorInvalidDevice", "cudaDeviceEnablePeerAccess", 0, 0)
refused("cudaErrorInvalidValue", "cudaDeviceEnablePeerAccess", 3, 1)
call("cudaDeviceDisablePeerAccess", 1)
refused("cudaErrorPeerAccessNotEnabled", "cudaDeviceDisablePeerAccess", 1)
for peer, arrived in ((1, b"abcd"), (2, b"abcd"), (3, bytes(255 - c for c in b"abcd"))):
    if peer != 2:
        call("cudaDeviceEnablePeerAccess", peer, 0)
    call("cudaMemcpy", memory[0], b"abcd", N(4), TO_DEVICE)
    call("cudaMemcpyPeerAsync", memory[peer], peer, memory[0], 0, N(4), None)
    assert read(memory[peer], 4) == arrived, peer
#: handles are checked
call("cudaSetDevice", 1)
stream, event = made("cudaStreamCreateWithFlags", NON_BLOCKING), made("cudaEventCreate")
call("cudaEventRecord", event, stream)
call("cudaSetDevice", 0)
invalid = lambda *arguments: refused("cudaErrorInvalidResourceHandle", *arguments)
assert invalid("cudaEventRecord", event, None) == "invalid resource handle"
other = made("cudaStreamCreate")
invalid("cudaEventRecord", event, other)
call("cudaEventDestroy", event)
invalid("cudaEventDestroy", event)
invalid("cudaEventQuery", event)
call("cudaStreamDestroy", stream)
invalid("cudaStreamDestroy", stream)
invalid("cudaStreamSynchronize", stream)
invalid("cudaMemsetAsync", malloc(4), 0, N(4), stream)
for foreign in (P(3), P(id(object())), P(stream.value + 8), P(2**64 - 1)):
    invalid("cudaStreamQuery", foreign)
    invalid("cudaEventQuery", foreign)
invalid("cudaEventQuery", None)
invalid("cudaStreamDestroy", None)
refused("cudaErrorInvalidValue", "cudaStreamCreateWithFlags", ctypes.byref(P()), 8)
#: what the runtime does not have names itself
assert "cudaGraphAddKernelNode" in refused("cudaErrorUnknown", "cudaGraphAddKernelNode")
assert libraries.counts().calls["cudaGraphAddKernelNode"] == 1
refused("cudaErrorNotSupported", "cudaMallocAsync", ctypes.byref(P()), N(4), None)
assert number("cudaDeviceGetAttribute", 115, 0) == 0  # memory pools
assert CUDA.cuMemCreate(None, N(4), None, 0) == 801
#: a child may not use what its parent has used
import os
def in_child(body):
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
in_child(lambda: call("cudaFree", None))
number("cudaGetDeviceCount")
in_child(lambda: refused("cudaErrorInitializationError", "cudaSetDevice", 0))
call("cudaSetDevice", 0)
#: nvml
nvml = ctypes.CDLL("libnvidia-ml.so.1")
handle, other, text = P(), P(), ctypes.create_string_buffer(96)
assert nvml.nvmlDeviceGetHandleByIndex_v2(3, ctypes.byref(handle)) == 1  # not initialised
assert nvml.nvmlInit_v2() == 0
assert nvml.nvmlDeviceGetHandleByIndex_v2(3, ctypes.byref(handle)) == 0
assert nvml.nvmlDeviceGetHandleByIndex_v2(8, ctypes.byref(other)) == 2
assert nvml.nvmlDeviceGetUUID(handle, text, 96) == 0 and text.value.startswith(b"GPU-")
assert nvml.nvmlDeviceGetHandleByUUID(text, ctypes.byref(other)) == 0 and other.value == handle.value
malloc(1 << 20, 3)
memory = (ctypes.c_ulonglong * 3)()
assert nvml.nvmlDeviceGetMemoryInfo(handle, memory) == 0 and memory[2] == 1 << 20 == memory[0] - memory[1]
count, processes = ctypes.c_uint(1), (ctypes.c_ulonglong * 3)()
assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes) == 0
assert count.value == 1 and processes[0] & 0xffffffff == __import__("os").getpid() and processes[1] == 1 << 20
assert nvml.nvmlShutdown() == 0
"""


@programs(PROGRAMS)
def test_program(program):
    run_script(START + program)


def test_variable_for_visible_devices():
    text = """
assert number("cudaGetDeviceCount") == int(__import__("os").environ["EXPECTED"])
bus = ctypes.create_string_buffer(16)
call("cudaDeviceGetPCIBusId", bus, 16, 0)
assert bus.value == b"0000:06:00.0"
count = ctypes.c_uint()
nvml = ctypes.CDLL("libnvidia-ml.so.1")
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value == 8
"""
    script(text, CUDA_VISIBLE_DEVICES="5,0", EXPECTED="2")
    script(text, CUDA_VISIBLE_DEVICES="5,9,1", EXPECTED="1")
    text = """
count = ctypes.c_int(7)
refused("cudaErrorNoDevice", "cudaGetDeviceCount", ctypes.byref(count))
assert count.value == 0
refused("cudaErrorNoDevice", "cudaSetDevice", 0)
"""
    script(text, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("free", ["cudaFree", "cudaFreeHost"])
def test_freed_memory_ends_the_process(free):
    done = run(f"""{START}
memory = malloc(4096) if "{free}" == "cudaFree" else made("cudaMallocHost", N(4096))
ctypes.memset(memory, 1, 4096)
call("{free}", memory)
print("freed", flush=True)
ctypes.memset(memory, 1, 1)
""")
    assert (done.stdout, done.returncode) == ("freed\n", -signal.SIGSEGV), done.stderr


WITH_TORCH = """
from nogpu.cuda import libraries
libraries.open_libraries()
import torch
"""


def test_a_process_with_tensors_streams_and_threads_ends_in_order():
    run_script(f"""{WITH_TORCH}
import threading
kept = [torch.empty(10, device=f"cuda:{{i}}") for i in range(4)]
pinned = torch.empty(10, pin_memory=True)
stream, event = torch.cuda.Stream(), torch.cuda.Event()
event.record(stream)
thread = threading.Thread(target=lambda: kept.append(torch.empty(3, device="cuda:6")))
thread.start(); thread.join()
""")


@pytest.mark.parametrize(
    ("body", "setting", "text"),
    [
        ("a = torch.empty(3, device='cuda'); a + a", "", "does not compute the kernel void at::native::"),
        ("torch.empty(3, device='cuda')", "expandable_segments:True", "operation not supported"),
        ("torch.empty(3, device='cuda')", "backend:cudaMallocAsync", "operation not supported"),
    ],
    ids=["kernel", "expandable segments", "memory pools"],
)
def test_what_is_not_there_is_refused(body, setting, text):
    done = run(WITH_TORCH + body, PYTORCH_CUDA_ALLOC_CONF=setting)
    assert done.returncode == 1
    assert text in done.stderr


def test_too_late():
    done = run("import torch\nfrom nogpu.cuda import libraries\nlibraries.open_libraries()")
    assert done.returncode == 1
    assert "SimulationTooLate: torch has opened CUDA's libraries already" in done.stderr
