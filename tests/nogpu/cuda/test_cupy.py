"""CuPy as installed on a stand-in: its own kernels, the transport's, and what clocks say of them.

Every test is a process of its own, because the stand-in is started before torch and CuPy are imported.
"""

import importlib.util

import pytest

from nogpu.cuda.possible import why_not_here
from processes import run, run_script
from stand_in import programs

WHY_NOT = why_not_here() or (None if importlib.util.find_spec("cupy") else "needs CuPy: pip install cupy-cuda13x")
pytestmark = [
    pytest.mark.devices("cpu"),  # they start their own processes
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

START = """
from types import SimpleNamespace
from nogpu import cuda
devices = cuda.stand_in(3)
import cupy, numpy, torch
from types import SimpleNamespace
from dataparallel.comm import kernels as launching

def module(source, *names):
    return cupy.RawModule(code=source, name_expressions=names or None)

def fails(call, *words):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        for word in words:
            assert word in str(error), str(error)
    else:
        raise AssertionError("no error")
"""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What takes minutes is done before the first test, which the watchdog counts."""
    if WHY_NOT is None:
        run_script(START, timeout=900)


PROGRAMS = r"""
#: arrays and cupys own kernels
assert cupy.cuda.runtime.getDeviceCount() == 3
x = cupy.asarray(numpy.arange(1000, dtype="f4"))
numpy.testing.assert_array_equal((2 * x + 1).get(), 2 * numpy.arange(1000, dtype="f4") + 1)
assert int(x.sum()) == 499500 and int(x.argmax()) == 999
assert (x.astype("f2") * 2).get()[3] == 6 and (x[:3] * 1j).sum().get() == 3j
numpy.testing.assert_array_equal(x[cupy.asarray([7, 2])].get(), [7, 2])
with cupy.cuda.Device(1):
    assert (cupy.ones(3) + 1).device.id == 1
#: accesses are known to the byte
# Two streams write the even and the odd halves of one allocation, block by block: no race, and then one.
source = '''extern "C" __global__ void fill(float* x, int first) { x[first + blockIdx.x * 512 + threadIdx.x] = 1; }'''
x = torch.zeros(4096, device=devices[0])
torch.cuda.synchronize()
fill = module(source).get_function("fill")
streams = [torch.cuda.Stream() for _ in range(3)]
def launch(stream, first):
    fill((8,), (256,), (x.data_ptr(), numpy.int32(first)), stream=SimpleNamespace(ptr=stream.cuda_stream))
launch(streams[0], 0)
launch(streams[1], 256)
fails(lambda: launch(streams[2], 1), "race: fill", "'x'")
torch.cuda.synchronize()
assert x.cpu().sum() == 4096
#: a timeline has what a kernel reads of each peer and the bytes of its own device
source = '''extern "C" __global__ void add(float* out, const float* a, const float* b) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  out[i] = a[i] + b[i];
}'''
add = module(source).get_function("add")
out, a, b = torch.zeros(1024, device=devices[0]), *(torch.ones(1024, device=device) for device in devices[1:])
for device in devices[1:]: out.to(device)  # makes it a peer
for device in devices: torch.cuda.synchronize(device)
torch.cuda.set_device(0)
def launch():
    add((4,), (256,), (out.data_ptr(), a.data_ptr(), b.data_ptr()))
def recorded():
    with cuda.timeline() as timeline:
        launch()
    (found,) = timeline.recording.launches
    return found.op, found.bytes_read, found.bytes_written, found.peers
assert recorded() == ("add", 0, 4096, ((1, 0, 4096), (2, 0, 4096)))
assert out.cpu().sum() == 2048
a = out.clone()
assert recorded() == ("add", 4096, 4096, ((2, 0, 4096),))
#: a program says what its kernels touch and they are not run
source = '''extern "C" __global__ void follow(float*** table) { **table[0] = 1; }'''
follow = module(source).get_function("follow")
out, *others = (torch.zeros(1 << 20, device=device) for device in devices)
for device in devices[1:]: out.to(device)  # makes it a peer
for device in devices: torch.cuda.synchronize(device)
torch.cuda.set_device(0)
with cuda.skipped_work(), cuda.timeline() as timeline, cuda.described_kernels([others[1], others[0][:7]], [out]):
    follow((1,), (1,), (0,))
    fails(lambda: cuda.described_kernels([], []).__enter__(), "is open in this thread")
(found,) = timeline.recording.launches
assert (found.op, found.bytes_written, found.peers) == ("follow", 4 << 20, ((1, 0, 28), (2, 0, 4 << 20)))
for wrong in (torch.zeros(3), out[::2]):
    fails(lambda: cuda.described_kernels([wrong], []).__enter__(), "contiguous CUDA tensors")
# The clocks see them as they see other launches.
for device in devices: torch.cuda.synchronize(device)
with torch.cuda.stream(torch.cuda.Stream(devices[1])): others[0].add_(1)
with cuda.described_kernels([others[0]], [out]):
    fails(lambda: follow((1,), (1,), (0,)), "race: follow reads", "cuda:1")
for device in devices: torch.cuda.synchronize(device)
#: threads of a block wait for each other
source = '''
namespace inner {
template <typename T> __global__ void total(const T* x, T* sum, int count) {
  extern __shared__ char raw[];
  T* shared = reinterpret_cast<T*>(raw);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  shared[threadIdx.x] = i < count ? x[i] : T(0);
  __syncthreads();
  for (int half = blockDim.x / 2; half >= 32; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    __syncthreads();
  }
  T value = shared[threadIdx.x % 32];
  for (int delta = 16; delta > 0; delta /= 2) value += __shfl_down_sync(0xffffffffu, value, delta);
  if (threadIdx.x == 0) atomicAdd(sum, value);
}
}
__device__ int seen = 5;
__global__ void votes(int* out) {
  __shared__ int first;
  if (threadIdx.x == 0) first = seen;
  __syncthreads();
  out[threadIdx.x] = __popc(__ballot_sync(0xffffffffu, threadIdx.x % 3 == 0)) + first;
}
'''
built = module(source, "inner::total<float>", "inner::total<double>", "votes")
for dtype, name in (("f4", "float"), ("f8", "double")):
    x, total = cupy.asarray(numpy.arange(5000, dtype=dtype)), cupy.zeros(1, dtype)
    built.get_function(f"inner::total<{name}>")((20,), (256,), (x, total, numpy.int32(5000)), shared_mem=256 * 8)
    assert total.get()[0] == 4999 * 2500
out = cupy.zeros(64, "i4")
built.get_function("votes")((1,), (64,), (out,))
numpy.testing.assert_array_equal(out.get(), [11 + 5] * 64)
#: what is wrong with a kernel names itself
source = '''
extern "C" __global__ void far(float* x) { x[100000000000] = 1; }
extern "C" __global__ void apart(int* x) { if (threadIdx.x < 3) __syncwarp(15); else __syncthreads(); }
extern "C" __global__ void outside(int* x) { __syncwarp(1); }
extern "C" __global__ void traps(int* x) { __trap(); }
extern "C" __global__ void reads(const float* x, float* y) { y[0] = x[0]; }
'''
built, x = module(source), cupy.zeros(4, "f4")
launch = lambda name, *arguments: built.get_function(name)((1,), (64,), arguments)
fails(lambda: launch("far", x), "far stopped", "in no memory of CUDA's")
fails(lambda: launch("apart", x), "apart stopped", "wait for others")
fails(lambda: launch("outside", x), "outside stopped", "in which it is not itself")
fails(lambda: launch("traps", x), "__trap")
fails(lambda: built.get_function("far")((1,), (2000,), (x,)), "CUDA_ERROR_INVALID_VALUE")
with cupy.cuda.Device(1):
    there = cupy.zeros(4, "f4")
    cupy.cuda.Device(1).synchronize()
fails(lambda: launch("reads", there, x), "reads", "which cuda:0 has not mapped")
#: what does not compile names itself
def built(source):
    try:
        module(source).get_function("f")
    except cupy.cuda.compiler.CompileException as error:
        return str(error)
    raise AssertionError("it compiles")
assert "Inline PTX cannot run on the host" in built(
    '''extern "C" __global__ void f(float* x) { asm("add.f32 %0,%0,%0;" : "+f"(*x)); }''')
assert "missing_function" in built('''extern "C" __global__ void f(float* x) { missing_function(x); }''')
assert "dynamic shared memory" in built('''extern __shared__ int x[]; extern "C" __global__ void f() { x[0] = 1; }''')
try:
    cupy.cuda.function.Module().load(b"\x7fELF" + bytes(100))
except RuntimeError as error:
    assert "a cubin for GPUs" in str(error)
else:
    raise AssertionError("it was loaded")
"""


@programs(PROGRAMS)
def test_program(program):
    run_script(START + program, timeout=900)


def test_cupy_that_came_first_is_too_late() -> None:
    done = run("import cupy\nfrom nogpu import cuda\ncuda.stand_in(1)", timeout=300)
    assert done.returncode != 0
    assert "imported already" in done.stderr or "has been imported" in done.stderr
