"""Small programs with one fault each: devices without hardware find it by its name, and nothing where it is mended.

Without lines that end with ``# mends`` a program has its fault. Without those that end with ``# fault`` it has none.
It finds the names of `run_planted.names`: ``x`` and ``y`` on device ``a``, ``h`` in pinned memory, the default stream
``main`` and the streams ``side`` and ``third`` of ``a``, ``side_b`` of ``b``.
"""

import functools
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from processes import environment
from stand_in import needs_stand_in

pytestmark = pytest.mark.devices("cpu")  # they have a process of their own

# The fault, the words that name it (a regular expression), and the program.

# Programs for simulated devices too.
TABLE = r"""
a stream that does not wait: race: aten::add reads its argument 'self' in \S+:0 on the default stream
    with on(side): torch.mul(x, 2, out=y)
    main.wait_stream(side)  # mends
    y + 1
a write that does not wait for a read: race: aten::add_ writes its argument 'self'.*aten::sum, which reads
    with on(side): x.sum()
    main.wait_stream(side)  # mends
    x.add_(1)
an event recorded before the work: race: aten::add reads
    e = Event()
    e.record(side)  # fault
    with on(side): torch.mul(x, 2, out=y)
    e.record(side)  # mends
    main.wait_event(e)
    y + 1
an event of another stream: race: aten::add reads
    with on(side): torch.mul(x, 2, out=y)
    e = third.record_event()  # fault
    e = side.record_event()  # mends
    main.wait_event(e)
    y + 1
an event that was never recorded: race: aten::add reads
    e = Event()
    with on(side): torch.mul(x, 2, out=y)
    e.record(side)  # mends
    main.wait_event(e)
    y + 1
another stream waits: race: aten::add reads
    with on(side): torch.mul(x, 2, out=y)
    third.wait_stream(side)  # fault
    main.wait_stream(side)  # mends
    y + 1
a stream of another device waits: race: aten::add reads
    with on(side): torch.mul(x, 2, out=y)
    device.current_stream(b).wait_stream(side)  # fault
    device.current_stream(a).wait_stream(side)  # mends
    y + 1
a stream of another device is made current: race: aten::add reads
    with on(side_b): torch.mul(x, 2, out=y)  # on main: the stream of b is none for a
    side.wait_stream(side_b)  # fault
    side.wait_stream(main)  # mends
    with on(side): y + 1
record_stream left out: freed too early: .*memory in \S+:0
    with on(side): z = x * 2
    main.wait_stream(side)
    z + 1
    z.record_stream(main)  # mends
    del z
    with on(side): torch.ones_like(x)
record_stream left out, and nobody takes the memory: freed too early: memory in \S+:0 went back to stream
    with on(side): z = x * 2
    main.wait_stream(side)
    z + 1
    z.record_stream(main)  # mends
    del z
record_stream of another stream: freed too early
    with on(side): z = x * 2
    main.wait_stream(side)
    z + 1
    z.record_stream(third)  # fault
    z.record_stream(main)  # mends
    del z
    with on(side): torch.ones_like(x)
memory freed while a copy to another device runs: freed too early.*(cudaMemcpy.*Async|_copy_from), which reads
    z = x * 2
    side.wait_stream(main)
    with on(side): on_b.copy_(z, non_blocking=True)
    z.record_stream(side)  # mends
    del z
    torch.ones_like(x)
memory freed while a copy to the host runs: freed too early.*(cudaMemcpyAsync|_copy_from), which reads
    z = x * 2
    side.wait_stream(main)
    with on(side): h.copy_(z, non_blocking=True)
    side.synchronize()  # mends
    del z
a batch that was fetched ahead is freed: freed too early
    with on(side): batch = h.to(a, non_blocking=True)
    main.wait_stream(side)
    batch.record_stream(main)  # mends
    torch.mul(batch, 2, out=y)
    del batch
    with on(side): h.to(a, non_blocking=True)
memory taken on one stream and used on another: race: aten::fill_ writes.*the allocation of that memory
    x.add_(1)
    z = torch.empty(1000, device=a)
    side.wait_stream(main)  # mends
    with on(side): z.fill_(1)
    side.synchronize()
pinned memory overwritten by a stream while another reads it: race: (cudaMemcpyAsync|aten::_copy_from) writes
    with on(side): y.copy_(h, non_blocking=True)
    main.wait_stream(side)  # mends
    h.copy_(x, non_blocking=True)
a thread hands over without an event: race: aten::add reads
    def work():
        with on(side): torch.mul(x, 2, out=y)
    thread = threading.Thread(target=work)
    thread.start(); thread.join()
    main.wait_stream(side)  # mends
    y + 1
a backward on another stream: race: aten::add reads.*\S+:0 on the default stream
    w = x.clone().requires_grad_()
    side.wait_stream(main)
    with on(side): (w * w).sum().backward()
    main.wait_stream(side)  # mends
    w.grad + 1
two streams write parts that overlap: race: aten::fill_ writes.*aten::fill_, which writes bytes 1600 to 2400
    x[:600].fill_(1)
    with on(side):
        x[400:].fill_(2)  # fault
        x[600:].fill_(2)  # mends
two streams write columns that overlap: race: aten::fill_ writes
    m[:, :10].fill_(1)
    with on(side):
        m[:, 9:].fill_(2)  # fault
        m[:, 10:].fill_(2)  # mends
an update in place while a gather reads: race: aten::mul_ writes.*aten::index_select, which reads
    chosen = torch.arange(10, device=a)
    side.wait_stream(main)
    with on(side): x.index_select(0, chosen)
    main.wait_stream(side)  # mends
    x.mul_(2)
a copy between devices is read on another stream: race: aten::add reads.*\S+:1 on stream
    on_b.copy_(x, non_blocking=True)
    side_b.wait_stream(device.current_stream(b))  # mends
    with on(side_b): on_b + 1
the source of a copy between devices changes: race: aten::zero_|race: aten::fill_ writes
    with on(side): on_b.copy_(x, non_blocking=True)
    main.wait_stream(side)  # mends
    x.fill_(0)
the time of an event that was not recorded: recorded
    first, last = Event(enable_timing=True), Event(enable_timing=True)
    first.record()
    last.record()  # mends
    last.synchronize()
    first.elapsed_time(last)
what a stream makes is copied to another device: race: .* reads
    with on(side): torch.mul(x, 2, out=y)
    main.wait_stream(side)  # mends
    y.to(b)
a copy from pinned memory is read on another stream: race: aten::add reads
    with on(side): batch = h.to(a, non_blocking=True)
    main.wait_stream(side)  # mends
    batch + 1
    batch.record_stream(main)
memory of a copy from the host is taken again: freed too early
    z = x * 2
    side.wait_stream(main)
    with on(side): z + 1
    main.wait_stream(side)  # mends
    del z
    torch.ones(1000).to(a)
"""

# The first comes first: a copy between two devices makes torch ask all devices, which makes contexts.
OF_CUDA = r"""
a context too many: contexts on devices \[6\]
    with cuda.counted() as counts:
        torch.cuda.set_device(6)  # fault
        torch.cuda.set_device(0)
        x.add_(1)
    steady(counts)
torch.Stream.wait_event of a torch.cuda.Event: race: aten::add reads
    s = torch.Stream(a)
    torch.mul(x, 2, out=y)
    e = main.record_event()
    s.wait_event(e)  # fault
    e.wait(s)  # mends
    with s: y + 1
record_stream of another device's default stream, which torch ignores: freed too early
    z = torch.ones(1000, device=b)  # its stream has the handle of main: both are null
    main.wait_stream(torch.cuda.current_stream(b))
    x.copy_(z)
    torch.cuda.synchronize()
    rt.check(rt.cudaMemcpyPeerAsync(x.data_ptr(), 0, z.data_ptr(), 1, 4000, 0))
    z.record_stream(main)
    torch.cuda.current_stream(b).wait_stream(main)  # mends
    del z
    torch.ones(1000, device=b)
pinned memory read before it has arrived: race: aten::sum on the host reads.*pinned host memory
    h.copy_(x, non_blocking=True)
    main.synchronize()  # mends
    h.sum()
tolist of what has not arrived: race: tolist on the host reads
    z = x.to("cpu", non_blocking=True)
    main.synchronize()  # mends
    z.tolist()
numpy of what has not arrived: race: numpy on the host reads
    z = x.to("cpu", non_blocking=True)
    main.synchronize()  # mends
    z.numpy()
item of what has not arrived: race: aten::_local_scalar_dense on the host reads
    h.copy_(x, non_blocking=True)
    main.synchronize()  # mends
    float(h[7])
the host waits for an event before the copy: race: aten::sum on the host reads
    e = main.record_event()  # fault
    h.copy_(x, non_blocking=True)
    e = main.record_event()  # mends
    e.synchronize()
    h.sum()
the host waits for another device: race: aten::sum on the host reads
    h.copy_(x, non_blocking=True)
    torch.cuda.synchronize(b)  # fault
    torch.cuda.synchronize(a)  # mends
    h.sum()
the host asks and does not look at the answer: race: aten::sum on the host reads
    with cuda.late_queries():
        h.copy_(x, non_blocking=True)
        e = main.record_event()
        e.query()  # fault
        e.synchronize()  # mends
        h.sum()
pinned memory overwritten while it is sent: race: aten::fill_ on the host writes
    x.copy_(h, non_blocking=True)
    main.synchronize()  # mends
    h.fill_(2)
pinned memory overwritten by a copy of the host: race: aten::copy_ on the host writes
    x.copy_(h, non_blocking=True)
    main.synchronize()  # mends
    h.copy_(torch.ones(1000))
a ring of pinned buffers that comes round too early: race: aten::fill_ on the host writes
    ring = [torch.zeros(10, pin_memory=True) for _ in range(2)]
    sent = [Event(), Event()]
    for i in range(4):
        sent[i % 2].synchronize()  # mends
        ring[i % 2].fill_(i)
        with on(side): y[:10].copy_(ring[i % 2], non_blocking=True)
        sent[i % 2].record(side)
registered memory given back while it is sent: freed too early: memory in pinned host memory ceases to exist
    z = torch.zeros(1 << 16)
    rt.check(rt.cudaHostRegister(z.data_ptr(), z.nbytes, 0))
    x.copy_(z[:1000], non_blocking=True)
    main.synchronize()  # mends
    rt.check(rt.cudaHostUnregister(z.data_ptr()))
cudaFree of what another device still reads: freed too early: memory in cuda:0 ceases to exist
    memory = rt.memory(4000)
    rt.check(rt.cudaMemcpyPeerAsync(on_b.data_ptr(), 1, memory, 0, 4000, side_b.cuda_stream))
    side_b.synchronize()  # mends
    rt.check(rt.cudaFree(memory))
the cache emptied while another device still reads: freed too early: memory in cuda:0 ceases to exist.*of cuda:1
    z = torch.ones(3 << 20, device=a)
    side_b.wait_stream(main)
    rt.check(rt.cudaMemcpyPeerAsync(on_b.data_ptr(), 1, z.data_ptr(), 0, 4000, side_b.cuda_stream))
    side_b.synchronize()  # mends
    del z
    torch.cuda.empty_cache()
the cache emptied after a wait of the memory's own stream: freed too early: memory in cuda:0 ceases to exist.*of cuda:1
    z = torch.ones(3 << 20, device=a)
    side_b.wait_stream(main)
    rt.check(rt.cudaMemcpyPeerAsync(on_b.data_ptr(), 1, z.data_ptr(), 0, 4000, side_b.cuda_stream))
    main.wait_stream(side_b)
    e = side_b.record_event()
    e.query()  # mends
    del z
    torch.cuda.empty_cache()
the cache emptied after later work of the memory's own device: freed too early: memory in cuda:0 ceases to exist
    z = torch.ones(3 << 20, device=a)
    side_b.wait_stream(main)
    rt.check(rt.cudaMemcpyPeerAsync(on_b.data_ptr(), 1, z.data_ptr(), 0, 4000, side_b.cuda_stream))
    main.wait_stream(side_b)
    z.zero_()
    side_b.synchronize()  # mends
    del z
    torch.cuda.empty_cache()
the cache emptied before a copy has arrived: memory in \S+:1 ceases to exist.*which writes.*of \S+:0
    z = torch.ones(3 << 20, device=a)
    side.wait_stream(main)
    with on(side): there = z.to(b)
    there.record_stream(side)  # mends
    del there
    torch.cuda.empty_cache()
    side.synchronize()  # before z is freed
a call whose error nobody asks for: race: cudaMemcpyAsync writes
    with on(side): torch.mul(x, 2, out=y)
    main.wait_stream(side)  # mends
    rt.cudaMemcpyAsync(y.data_ptr(), x.data_ptr(), 4000, 3, main.cuda_stream)
another thread's wait was for something else: race: aten::sum on the host reads
    h.copy_(x, non_blocking=True)
    thread = threading.Thread(target=side.synchronize)  # fault
    thread = threading.Thread(target=main.synchronize)  # mends
    thread.start(); thread.join()
    h.sum()
the default stream waits for no stream of torch's: race: aten::add reads
    s = torch.cuda.ExternalStream(rt.stream(1), a)  # fault
    s = torch.cuda.ExternalStream(rt.stream(0), a)  # mends
    with on(s): torch.mul(x, 2, out=y)
    y + 1
a device twice in a collective: inputs must be on unique devices
    torch.cuda.nccl.all_reduce([x, y])  # fault
    torch.cuda.nccl.all_reduce([x, on_b])  # mends
a collective on a stream that has not waited: race: ncclBroadcast|race: .*roadcast.* reads
    with on(side): torch.mul(x, 2, out=y)
    main.wait_stream(side)  # mends
    torch.cuda.nccl.broadcast([y, on_b])
the result of a collective read on another stream: race: aten::add reads.*cuda:1 on stream.*ncclAllReduce
    torch.cuda.nccl.all_reduce([x, on_b])
    side_b.wait_stream(torch.cuda.current_stream(b))  # mends
    with on(side_b): on_b + 1
the root of a broadcast does not wait for those that receive: race: cudaMemcpyPeerAsync reads.*aten::mul_, which writes
    z = torch.ones(1000, device=b)
    torch.cuda.synchronize(b)
    with torch.cuda.device(b): z.mul_(2)
    torch.cuda.nccl.broadcast([x, on_b])
    main.wait_stream(torch.cuda.current_stream(b))  # mends
    rt.cudaMemcpyPeerAsync(y.data_ptr(), 0, z.data_ptr(), 1, 4000, main.cuda_stream)
different collectives on the ranks: kinds: where rank 0
    from nccl_calls import Buffer, N, abort, all_reduce, communicators, group, nccl
    comms, p, q = communicators(0, 1), Buffer([1, 2], 0), Buffer([3, 4], 1)
    torch.cuda.synchronize(a); torch.cuda.synchronize(b)
    second = lambda: nccl("ncclBroadcast", q.pointer, q.pointer, N(2), 7, 0, comms[1], q.stream)  # fault
    second = lambda: all_reduce(comms[1], q)  # mends
    try:
        group(lambda: all_reduce(comms[0], p), second)
        assert q.get() == [4, 6]
    finally: abort(*comms)
crossed collectives: wait for each other in a circle
    from nccl_calls import Buffer, abort, all_reduce, communicators
    pairs, told = [communicators(0, 1), communicators(0, 1)], []
    buffers = [[Buffer([rank], rank) for pair in pairs] for rank in (0, 1)]
    torch.cuda.synchronize(a); torch.cuda.synchronize(b)
    def launch(rank, order):
        try:
            for one in order: all_reduce(pairs[one][rank], buffers[rank][one])
            assert [buffer.get() for buffer in buffers[rank]] == [[1], [1]]
        except Exception as error: told.append(str(error))
    orders = [0, 1], [1, 0]  # fault
    orders = [0, 1], [0, 1]  # mends
    threads = [threading.Thread(target=launch, args=one) for one in enumerate(orders)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    for pair in pairs: abort(*pair)
    assert not told, told[0]
DLPack told not to wait: race: aten::add reads
    with on(side):
        torch.mul(x, 2, out=y)
        capsule = y.__dlpack__(stream=-1)  # fault
        capsule = y.__dlpack__(stream=1)  # mends
    torch.from_dlpack(capsule) + 1
an event of another device: does not match|resource handle
    e = Event()
    e.record(side_b)
    e = Event()  # mends
    e.record(main)
a stream that was destroyed: there is no such stream, or it was destroyed
    handle = rt.stream(1)
    rt.check(rt.cudaStreamDestroy(handle))  # fault
    s = torch.cuda.ExternalStream(handle, a)
    with on(s): x + 1
    s.synchronize()
an event that was destroyed: CUDA error 400
    e = Event()
    e.record(side)
    handle = e.cuda_event
    del e  # fault
    rt.check(rt.cudaStreamWaitEvent(main.cuda_stream, handle, 0))
the time of an event that is not done: not ready|not been completed|completed
    first, last = Event(enable_timing=True), Event(enable_timing=True)
    with cuda.late_queries():
        first.record(); x.add_(1); last.record()
        last.synchronize()  # mends
        first.elapsed_time(last)
a host wait in a steady step: host waits: cudaStreamSynchronize in step, planted.py:2
    def step():
        return float(x.sum())  # fault
        return x.sum()  # mends
    step()
    with cuda.counted() as counts: step()
    steady(counts)
a mask makes the host wait: host waits: aten::.* in <module>, planted.py:2
    with cuda.counted() as counts:
        x[x > 3]  # fault
        torch.where(x > 3, x, 0)  # mends
    steady(counts)
a blocking copy to the host in a steady step: host waits: cudaStreamSynchronize
    with cuda.counted() as counts:
        h.copy_(x)  # fault
        h.copy_(x, non_blocking=True)  # mends
    steady(counts)
an allocation in a steady step: allocations: 1
    kept = [torch.empty(1 << 23, device=a)]
    with cuda.counted() as counts:
        kept.append(torch.empty(1 << 23, device=a))  # fault
        kept[0].fill_(1)
    steady(counts)
a cache emptied in every step: host waits: cudaFree
    torch.empty(1 << 23, device=a)
    with cuda.counted() as counts:
        torch.cuda.empty_cache()  # fault
        x.add_(1)
    steady(counts)
more memory than there is: OutOfMemoryError: CUDA out of memory
    cuda.set_capacity(b, 64 << 20)
    try:
        torch.empty(100 << 20, dtype=torch.uint8, device=b)  # fault
        torch.empty(10 << 20, dtype=torch.uint8, device=b)  # mends
    finally:
        cuda.set_capacity(b, None)
a link that is broken: AssertionError: it arrived wrong
    cuda.set_link(0, 1, "broken")  # fault
    on_b.copy_(x)
    cuda.set_link(0, 1, "works")
    assert torch.equal(on_b.cpu(), x.cpu()), "it arrived wrong"
peers that cannot be: CUDA error 217
    cuda.set_link(0, 3, "missing")  # fault
    error = rt.cudaDeviceEnablePeerAccess(3, 0)
    cuda.set_link(0, 3, "works")
    rt.check(0 if error == 704 else error)
a value is read in a capture: previous error during capture
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): x.sum().item()  # fault
    torch.cuda.synchronize(a)
"""


def faults(table: str, kind: str) -> list[Any]:
    """For each program the words, the program and the kind of devices."""
    found = re.findall(r"^(\S.*?): (.*)\n((?:    .*\n)+)", table, flags=re.MULTILINE)
    marks = needs_stand_in if kind == "cuda" else ()
    return [
        pytest.param(words, textwrap.dedent(p), kind, id=f"{kind}: {name}", marks=marks) for name, words, p in found
    ]


FIRST, *OTHERS = faults(OF_CUDA, "cuda")
FAULTS = [FIRST, *faults(TABLE, "cuda"), *OTHERS, *faults(TABLE, "sim")]


@pytest.fixture(scope="module")
def found(available: None) -> Callable[[str], dict[str, list[str | None]]]:
    """What each program for a kind of devices raised with its fault and without."""

    @functools.cache
    def run(kind: str) -> dict[str, list[str | None]]:
        programs = [program for _, program, of in (each.values for each in FAULTS) if of == kind]
        done = subprocess.run(
            [sys.executable, "-m", "run_planted", kind],
            env=environment(NOGPU_NCCL_SECONDS="20"),
            input=json.dumps(programs),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(zip(programs, json.loads(done.stdout), strict=True))

    return run


@pytest.mark.parametrize(("words", "program", "kind"), FAULTS)
def test_a_fault_is_found_by_its_name_and_nothing_where_it_is_mended(words, program, kind, found):
    faulty, mended = found(kind)[program]
    assert faulty is not None, "nothing was found"
    assert re.search(words, faulty, re.DOTALL), faulty
    assert mended is None, mended
