"""The stand-in for CUDA's runtime, called by ctypes in processes of their own: it answers and refuses as CUDA does."""

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
#: contexts are made where cuda makes them
contexts = lambda: libraries.counts().contexts
number("cudaGetDeviceCount"); number("cudaGetDevice"); number("cudaDeviceCanAccessPeer", 0, 1)
call("cudaGetDeviceProperties", ctypes.create_string_buffer(4096), 0)
context, flags, active = P(), ctypes.c_uint(), ctypes.c_int(7)
assert CUDA.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value is None
assert CUDA.cuDevicePrimaryCtxGetState(2, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value == 0
assert contexts() == []
call("cudaSetDevice", 2)
assert contexts() == [2]
assert CUDA.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value is not None
assert CUDA.cuDevicePrimaryCtxGetState(2, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value == 1
call("cudaDeviceEnablePeerAccess", 4, 0)
assert contexts() == [2, 4]

import threading
def other_thread():  # its device is 0 until it says otherwise
    assert number("cudaGetDevice") == 0 and contexts() == [2, 4]
    call("cudaFree", None)
    assert contexts() == [0, 2, 4]
thread = threading.Thread(target=other_thread)
thread.start(); thread.join()
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
#: whose an address is
class Attributes(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("on_device", P), ("on_host", P), ("more", P * 8)]
def attributes(pointer):
    result = Attributes()
    call("cudaPointerGetAttributes", ctypes.byref(result), pointer)
    return result.type, result.device, result.on_device, result.on_host
memory = malloc(100, 3)
inner = after(memory, 50)
assert attributes(inner) == (2, 3, inner.value, None)
assert attributes(after(memory, 100))[0] == 0
pinned = made("cudaHostAlloc", N(100), 0)
assert attributes(pinned) == (1, 3, pinned.value, pinned.value)
buffer = ctypes.create_string_buffer(100)
own = ctypes.addressof(buffer)
assert attributes(P(own)) == (0, -2, None, own)
call("cudaHostRegister", buffer, N(100), 0)
assert attributes(P(own)) == (1, 3, own, own)
refused("cudaErrorHostMemoryAlreadyRegistered", "cudaHostRegister", P(own + 10), N(10), 0)
call("cudaHostUnregister", buffer)
refused("cudaErrorHostMemoryNotRegistered", "cudaHostUnregister", buffer)
assert attributes(P(own))[0] == 0
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
#: copies of boxes
class Memory(ctypes.Structure):
    _fields_ = [("begin", P), ("pitch", N), ("width", N), ("height", N)]
Three = N * 3
class Box(ctypes.Structure):
    _fields_ = [("from_array", P), ("from_position", Three), ("source", Memory), ("to_array", P),
                ("to_position", Three), ("to", Memory), ("extent", Three), ("kind", ctypes.c_int)]
buffer = ctypes.create_string_buffer(bytes(range(24)), 24)  # 2 planes of 3 rows of 4 bytes
memory = malloc(24)
call("cudaMemset", memory, 99, N(24))
box = Box(source=Memory(ctypes.addressof(buffer), 4, 4, 3), to=Memory(memory.value, 4, 4, 3), kind=TO_DEVICE)
box.from_position, box.to_position, box.extent = Three(1, 1, 0), Three(0, 0, 0), Three(2, 2, 2)
call("cudaMemcpy3D", ctypes.byref(box))
rows = lambda first, second: bytes([first, first + 1, 99, 99, second, second + 1, *[99] * 6])
assert read(memory, 24) == rows(5, 9) + rows(17, 21)
box.to_position = Three(3, 0, 1)  # beyond the end
box.extent = Three(2, 3, 1)
refused("cudaErrorInvalidValue", "cudaMemcpy3DAsync", ctypes.byref(box), None)
box.from_array = 1
assert "no arrays for textures" in refused("cudaErrorUnknown", "cudaMemcpy3D", ctypes.byref(box))
#: peers
libraries.set_link(0, 2, "missing")
libraries.set_link(0, 3, "broken")
log = Log()
check = lambda device, memory: log.library.log_check_access(device, memory, N(4)).decode()
memory = {device: malloc(4, device) for device in (1, 2, 3, 0)}
assert [number("cudaDeviceCanAccessPeer", 0, peer) for peer in range(4)] == [0, 1, 0, 1]
assert number("cudaDeviceCanAccessPeer", 2, 0) == 1
assert check(0, memory[0]) == "" and "doubles on cuda:0 reads memory of cuda:1 ('input')" in check(0, memory[1])
call("cudaDeviceEnablePeerAccess", 1, 0)
assert check(0, memory[1]) == "" and check(1, memory[0]) != ""
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
call("cudaStreamWaitEvent", other, event, 0)
call("cudaEventRecord", event, stream)
call("cudaEventDestroy", event)
invalid("cudaEventDestroy", event)
invalid("cudaEventQuery", event)
again = made("cudaEventCreate")
assert again.value != event.value
invalid("cudaStreamWaitEvent", other, event, 0)
call("cudaStreamDestroy", stream)
invalid("cudaStreamDestroy", stream)
invalid("cudaStreamSynchronize", stream)
invalid("cudaMemsetAsync", malloc(4), 0, N(4), stream)
for foreign in (P(3), P(id(object())), P(stream.value + 8), P(again.value), P(2**64 - 1)):
    invalid("cudaStreamQuery", foreign)
    if foreign.value != again.value:
        invalid("cudaEventQuery", foreign)
invalid("cudaEventQuery", None)
invalid("cudaStreamDestroy", None)
refused("cudaErrorInvalidValue", "cudaStreamCreateWithFlags", ctypes.byref(P()), 8)
refused("cudaErrorInvalidValue", "cudaEventCreateWithFlags", ctypes.byref(P()), 4)  # of processes, with timing
#: events that measure time
log = Log()
time = ctypes.c_float()
first, second, plain = made("cudaEventCreate"), made("cudaEventCreate"), made("cudaEventCreateWithFlags", NO_TIMING)
elapsed = lambda begin, end: ("cudaEventElapsedTime", ctypes.byref(time), begin, end)
refused("cudaErrorInvalidResourceHandle", *elapsed(first, second))
for event in (first, second, plain):
    call("cudaEventRecord", event, None)
refused("cudaErrorInvalidResourceHandle", *elapsed(first, plain))
call(*elapsed(first, second))
assert 0 <= time.value < 1000
log.library.log_answer(0)
assert refused("cudaErrorNotReady", *elapsed(first, second)) == "device not ready"
refused("cudaErrorNotReady", "cudaEventQuery", first)
refused("cudaErrorNotReady", "cudaStreamQuery", None)
call("cudaEventQuery", made("cudaEventCreate"))  # it was never recorded
call("cudaSetDevice", 1)
there = made("cudaEventCreate")
call("cudaEventRecord", there, None)
refused("cudaErrorInvalidResourceHandle", *elapsed(first, there))
#: streams say what they are
least, greatest = ctypes.c_int(), ctypes.c_int()
call("cudaDeviceGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
assert (least.value, greatest.value) == (0, -5)
call("cudaSetDevice", 2)
stream = made("cudaStreamCreateWithPriority", NON_BLOCKING, -9)
number_of = lambda function: (value := ctypes.c_int(), call(function, stream, ctypes.byref(value)))[0].value
assert number_of("cudaStreamGetPriority") == -5 and number_of("cudaStreamGetFlags") == NON_BLOCKING
assert number_of("cudaStreamGetDevice") == 2
#: errors of a thread
import threading
assert CUDA.cudaFree(P(8)) == 1
assert CUDA.cudaGetDevice(ctypes.byref(ctypes.c_int())) == 0  # success leaves the last error
results = []
thread = threading.Thread(target=lambda: results.append(CUDA.cudaGetLastError()))
thread.start(); thread.join()
assert results == [0]
assert [CUDA.cudaPeekAtLastError(), CUDA.cudaGetLastError(), CUDA.cudaGetLastError()] == [1, 1, 0]
assert CUDA.cuMemFree_v2(P(8)) == 1 and CUDA.cuDeviceGet(ctypes.byref(ctypes.c_int()), 9) == 101
assert CUDA.cudaGetLastError() == 0  # errors of the driver are its own
texts = {2: ("cudaErrorMemoryAllocation", "out of memory"), 700: ("cudaErrorIllegalAddress",
         "an illegal memory access was encountered"), 12345: ("unrecognized error code",) * 2}
for code, words in texts.items():
    assert (CUDA.cudaGetErrorName(code).decode(), CUDA.cudaGetErrorString(code).decode()) == words
name = ctypes.c_char_p()
assert CUDA.cuGetErrorName(2, ctypes.byref(name)) == 0 and name.value == b"CUDA_ERROR_OUT_OF_MEMORY"
assert CUDA.cuGetErrorString(12345, ctypes.byref(name)) == 1 and name.value is None
#: a watcher refuses a launch with its own words
log = Log()
memory = malloc(4)
call("cudaMemset", memory, 1, N(4))
log.library.log_refuse(b"a race of two things")
assert refused("cudaErrorUnknown", "cudaMemset", memory, 2, N(4)) == "a race of two things"
assert refused("cudaErrorUnknown", "cudaMemcpy", memory, b"abcd", N(4), TO_DEVICE) == "a race of two things"
log.library.log_refuse(b"")
assert read(memory, 4) == bytes([1] * 4)
#: what the runtime does not have names itself
assert "cudaGraphAddKernelNode" in refused("cudaErrorUnknown", "cudaGraphAddKernelNode")
assert libraries.counts().calls["cudaGraphAddKernelNode"] == 1
refused("cudaErrorNotSupported", "cudaMallocAsync", ctypes.byref(P()), N(4), None)
assert number("cudaDeviceGetAttribute", 115, 0) == 0  # memory pools
assert CUDA.cuMemCreate(None, N(4), None, 0) == 801
#: captured work is done at each launch of its graph
stream, memory, graph, instance = made("cudaStreamCreate"), malloc(4), P(), P()
refused("cudaErrorStreamCaptureUnsupported", "cudaStreamBeginCapture", None, 0)
refused("cudaErrorIllegalState", "cudaStreamEndCapture", stream, ctypes.byref(P()))
call("cudaMemset", memory, 1, N(4))
call("cudaStreamBeginCapture", stream, 1)
refused("cudaErrorIllegalState", "cudaStreamBeginCapture", stream, 1)
assert (status := ctypes.c_int(7), call("cudaStreamIsCapturing", stream, ctypes.byref(status)))[0].value == 1
call("cudaMemsetAsync", memory, 2, N(4), stream)
call("cudaStreamEndCapture", stream, ctypes.byref(graph))
call("cudaStreamIsCapturing", stream, ctypes.byref(status))
assert status.value == 0 and read(memory, 4) == bytes([1] * 4)
call("cudaGraphInstantiateWithFlags", ctypes.byref(instance), graph, ctypes.c_ulonglong(0))
call("cudaGraphDestroy", graph)
refused("cudaErrorInvalidValue", "cudaGraphDestroy", graph)
for value in (3, 4):
    call("cudaMemset", memory, value, N(4))
    call("cudaGraphLaunch", instance, stream)
    assert read(memory, 4) == bytes([2] * 4)
call("cudaGraphExecDestroy", instance)
refused("cudaErrorInvalidValue", "cudaGraphLaunch", instance, stream)
#: an object of the program lives as long as the graphs that retain it
stream, graph, instance, thing, gone = made("cudaStreamCreate"), P(), P(), P(), []
destroy = ctypes.CFUNCTYPE(None, P)(gone.append)
call("cudaStreamBeginCapture", stream, 1)
call("cudaStreamEndCapture", stream, ctypes.byref(graph))
call("cudaUserObjectCreate", ctypes.byref(thing), P(7), destroy, 1, 1)
call("cudaGraphRetainUserObject", graph, thing, 1, 1)  # moves the reference
call("cudaGraphInstantiateWithFlags", ctypes.byref(instance), graph, ctypes.c_ulonglong(0))
call("cudaGraphDestroy", graph)
assert gone == []
call("cudaGraphExecDestroy", instance)
assert gone == [7]
#: a capture is ended by its thread on its first stream
import threading
stream, other = made("cudaStreamCreate"), made("cudaStreamCreate")
call("cudaStreamBeginCapture", stream, 0)
results = []
thread = threading.Thread(target=lambda: results.append(CUDA.cudaStreamEndCapture(stream, ctypes.byref(P()))))
thread.start(); thread.join()
assert results == [908]  # cudaErrorStreamCaptureWrongThread
refused("cudaErrorStreamCaptureInvalidated", "cudaStreamEndCapture", stream, ctypes.byref(P()))
event = made("cudaEventCreate")
for first in (stream, other):
    call("cudaStreamBeginCapture", first, 1)
    call("cudaEventRecord", event, first)
refused("cudaErrorStreamCaptureMerge", "cudaStreamWaitEvent", stream, event, 0)
for first in (stream, other):
    refused("cudaErrorStreamCaptureInvalidated", "cudaStreamEndCapture", first, ctypes.byref(P()))
#: modes of captures
mode = ctypes.c_int(2)
call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
assert mode.value == 0
call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
assert mode.value == 2
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
#: kernels
class Three(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]
log = Log()
known, unknown = ctypes.create_string_buffer(1), ctypes.create_string_buffer(1)
for function, name in ((known, b"_Z7doublesPi"), (unknown, b"_Z7triplesPi")):
    CUDA.__cudaRegisterFunction(None, function, name, name, -1, None, None, None, None, None)
log.library.log_add_kernel(b"_Z7doublesPi")
memory = malloc(4)
call("cudaMemset", memory, 1, N(4))
arguments = (P * 1)(ctypes.addressof(memory))
launch = lambda function, grid=2, block=32, stream=None: (
    "cudaLaunchKernel", function, Three(grid, 1, 1), Three(block, 1, 1), arguments, N(8), stream)
log.lines()
call(*launch(known))
assert log.lines() == ["kernel on 0/0 of 2 x 32 with 8"]
assert read(memory, 4) == bytes([2] * 4)
text = refused("cudaErrorUnknown", *launch(unknown))
assert text == "the stand-in for CUDA does not compute the kernel triples(int*)"
assert libraries.counts().kernels == ["triples(int*)"]
refused("cudaErrorInvalidConfiguration", *launch(known, block=1025))
refused("cudaErrorInvalidDeviceFunction", *launch(memory))
stream = made("cudaStreamCreate")
call("cudaSetDevice", 1)
refused("cudaErrorInvalidResourceHandle", *launch(known, stream=stream))
#: functions of the driver are found by their names
function, found = P(), ctypes.c_int(7)
def find(name):
    flags = ctypes.c_ulonglong(0)
    call("cudaGetDriverEntryPointByVersion", name, ctypes.byref(function), 12000, flags, ctypes.byref(found))
    return found.value, function.value is not None
assert find(b"cuMemAlloc") == (0, True) and find(b"cuGetErrorString") == (0, True)
for absent in (b"cuGreenCtxCreate", b"cuLogsRegisterCallback", b"cuMulticastCreate", b"cudaMalloc", b"malloc"):
    assert find(absent) == (1, False), absent
assert CUDA.cuGetProcAddress_v2(b"cuGreenCtxCreate", ctypes.byref(function), 12080, ctypes.c_ulonglong(0), None) == 500
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuInit(0) == 0
context, device = P(), ctypes.c_int(7)
assert driver.cuCtxGetDevice(ctypes.byref(device)) == 201  # no context
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 3) == 0
assert driver.cuCtxPushCurrent_v2(context) == 0 and number("cudaGetDevice") == 3
memory = P()
assert driver.cuMemAlloc_v2(ctypes.byref(memory), N(16)) == 0
assert driver.cuMemcpyHtoD_v2(memory, b"0123456789abcdef", N(16)) == 0
assert driver.cuMemsetD32_v2(after(memory, 4), 0x41424344, N(2)) == 0
assert read(memory, 16) == b"0123DCBADCBAcdef"
assert driver.cuCtxPopCurrent_v2(None) == 0
assert driver.cuCtxGetDevice(ctypes.byref(device)) == 201
#: nvml
nvml = ctypes.CDLL("libnvidia-ml.so.1")
handle, other, text = P(), P(), ctypes.create_string_buffer(96)
assert nvml.nvmlDeviceGetHandleByIndex_v2(3, ctypes.byref(handle)) == 1  # not initialised
assert nvml.nvmlInit_v2() == 0
assert nvml.nvmlDeviceGetHandleByIndex_v2(3, ctypes.byref(handle)) == 0
assert nvml.nvmlDeviceGetHandleByIndex_v2(8, ctypes.byref(other)) == 2
assert nvml.nvmlDeviceGetUUID(handle, text, 96) == 0 and text.value.startswith(b"GPU-")
assert nvml.nvmlDeviceGetHandleByUUID(text, ctypes.byref(other)) == 0 and other.value == handle.value
call("cudaDeviceGetPCIBusId", text, 16, 3)
assert nvml.nvmlDeviceGetHandleByPciBusId_v2(text, ctypes.byref(other)) == 0 and other.value == handle.value
assert nvml.nvmlDeviceGetUUID(handle, text, 4) == 7  # too small
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


def test_the_machine_that_is_asked_for():
    run_script("""
import ctypes
from nogpu.cuda import libraries
from nogpu.cuda.machine import machine_like
from nogpu.compiling import SimulationTooLate
libraries.open_libraries()
assert libraries.counts().contexts == []
path = libraries.open_libraries(machine_like("rtx_3090", 3))
cuda, value = ctypes.CDLL(str(path)), ctypes.c_int()
assert cuda.cudaGetDeviceCount(ctypes.byref(value)) == 0 and value.value == 3
assert cuda.cudaDeviceGetAttribute(ctypes.byref(value), 76, 2) == 0 and value.value == 6
try:
    libraries.open_libraries(machine_like("a100", 2))
except SimulationTooLate as error:
    assert "set it before the first call of CUDA" in str(error)
else:
    raise AssertionError
""")


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
