"""What a test asks of the stand-in: switches, counts, host waits, late answers, timelines, links and capacities."""

import pytest

from nogpu import cuda
from processes import run_script
from stand_in import needs_stand_in, programs

pytestmark = pytest.mark.devices("cpu")  # they start their own processes

START = """
from nogpu import cuda
a, b, c = cuda.stand_in(3)
import threading, queue, torch
from concurrent.futures import ThreadPoolExecutor
from torch.cuda import stream as on
x, h = torch.ones(1000, device=a), torch.zeros(1000, pin_memory=True)
torch.cuda.synchronize()
main, side = torch.cuda.default_stream(a), torch.cuda.Stream(a)
def message(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.mark.skipif(cuda.is_stand_in(), reason="this process has a stand-in")
def test_without_a_stand_in_there_is_a_sentence():
    for function in (cuda.check_clocks, cuda.timeline, cuda.late_queries().__enter__, cuda.counted().__enter__):
        with pytest.raises(cuda.SimulationUnavailable, match="call stand_in first"):
            function()
    with pytest.raises(AttributeError, match="no attribute 'clock'"):
        cuda.clock  # noqa: B018


PROGRAMS = """
#: clocks are switched off and keep stacks
def read():
    with on(side): x + 1
x.add_(1)
with cuda.clocks(False): read()
x.add_(1)
with cuda.clocks(stacks=True):
    def write(): x.mul_(2)
    torch.cuda.synchronize()
    write()
    assert "in write" in message(read)
x.mul_(2)
text = message(read)
assert "nogpu.cuda.clocks(stacks=True) shows where" in text and "torch.sim" not in text, text
#: the check raises once what was found first
h.copy_(x, non_blocking=True)
h.sum()
text = message(cuda.check_clocks)
assert "aten::sum on the host reads" in text and "The host's access is here" in text, text
cuda.check_clocks()
torch.cuda.synchronize()
with on(side): z = x * 2
main.wait_stream(side)
z + 1
del z
assert "freed too early: memory in cuda:0 went back" in message(cuda.check_clocks)
cuda.check_clocks()
#: counts
import ctypes
with cuda.counted() as counts:
    x.add_(1)
    x[:500].to(b)
    def wait(): return x.sum().item()
    wait()
    torch.cuda.empty_cache()
assert counts.launches[0] >= 3 and counts.sent(a) == 2000 and counts.received(b) == 2000, counts.launches
waits = counts.host_waits
assert [wait.function for wait in waits if wait.call == "cudaStreamSynchronize"] == ["wait"], waits
assert all("no line of Python" in str(wait) for wait in waits if wait.call == "cudaFree")
assert counts.calls["cudaStreamSynchronize"] == 1
launches = counts.launches
x.add_(1)
assert counts.launches == launches
with cuda.counted() as counts: torch.empty(1 << 22, device=a)
assert (counts.allocations, counts.frees, counts.new_contexts, counts.host_waits) == (1, 0, [], [])
#: a query that says yes is a wait
h.copy_(x, non_blocking=True)
event = main.record_event()
assert event.query()
h.sum()
h.copy_(x, non_blocking=True)
event = torch.Event(a)
event.record(main)
assert event.query()
h.sum()
cuda.check_clocks()
#: what the allocators ask is not known to the program
with on(side): z = x * 2
main.wait_stream(side)
z + 1
z.record_stream(main)
h.copy_(x, non_blocking=True)
del z
with on(side): torch.ones_like(x)  # asks for the event on main
h.sum()
assert "aten::sum on the host reads" in message(cuda.check_clocks)
#: queues and executors carry what was waited for
passed, errors = queue.Queue(), []
def use():
    try: passed.get().sum()
    except Exception as error: errors.append(error)
thread = threading.Thread(target=use)
thread.start()
h.copy_(x, non_blocking=True)
main.synchronize()
passed.put(h)
thread.join()
with ThreadPoolExecutor(1) as pool:
    pool.submit(int).result()  # the thread has begun
    h.copy_(x, non_blocking=True)
    main.synchronize()
    pool.submit(h.sum).result()
    def fill():
        h.copy_(x, non_blocking=True)
        main.synchronize()
    pool.submit(fill).result()
h.sum()
cuda.check_clocks()
assert not errors, errors
#: a thread of unknown origin knows what anybody knows
# Such as those of process groups. What nobody has waited for is a race there too.
import _thread
def sum_elsewhere():
    done = threading.Lock()
    done.acquire()
    def run():
        try: h.sum()
        finally: done.release()
    _thread.start_new_thread(run, ())
    done.acquire()
h.copy_(x, non_blocking=True)
main.synchronize()
sum_elsewhere()
cuda.check_clocks()
h.copy_(x, non_blocking=True)
sum_elsewhere()
assert "aten::sum on the host reads" in message(cuda.check_clocks)
#: a timeline is recorded and scheduled
from nogpu.timeline.presets import A100
model = torch.nn.Linear(1000, 10).to(a)
with cuda.timeline() as timeline:
    with on(side):
        side.wait_stream(main)
        loss = model(x).sum()
    main.wait_stream(side)
    loss.backward()
    moved = x.to(b)
    loss.item()
launches = timeline.recording.launches
assert any(launch.op == "aten::addmm" and launch.flops for launch in launches), launches
(copy,) = [launch for launch in launches if launch.copy == (0, 1)]
assert copy.bytes_written == 4000, copy
assert any(launch.in_backward for launch in launches)
assert timeline.schedule(A100).time > 0
block = cuda.timeline(limit=1)
block.__enter__()
x.add_(1), x.add_(1)
assert "nogpu.cuda.timeline(limit=1)" in message(block.__exit__, None, None, None)
#: skipped work is launched and not done
y = torch.zeros(1000, device=a)
torch.cuda.synchronize(a)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y.add_(1)
torch.cuda.synchronize(a)
model = torch.nn.Sequential(torch.nn.Linear(1000, 10), torch.nn.ReLU()).to(a)
def step():
    model(x).sum().backward()
    x.to(b)
    y.zero_()
def ops():
    with cuda.timeline() as timeline:
        step()
    return [(launch.op, launch.bytes_written, launch.flops) for launch in timeline.recording.launches]
step()
torch.cuda.synchronize(a)
model.zero_grad()
expected = ops()
y.fill_(7)
model.zero_grad()
with cuda.skipped_work():
    with cuda.skipped_work():
        assert ops() == expected
    graph.replay()
    y.fill_(5)
    y.copy_(torch.ones(1000))
    large = [torch.ones(4000, 4000, device=a) for _ in range(2)]
    assert (large[0] @ large[1]).shape == (4000, 4000)
assert y.sum() == 7000
graph.replay()
assert y.sum() == 8000
cuda.check_clocks()
#: capacities and links that cannot be
assert "one of works, missing, broken" in message(cuda.set_link, a, c, "slow")
assert "has 3 devices" in message(cuda.set_link, a, 5, "works")
assert "about CUDA devices" in message(cuda.set_capacity, "cpu", 5)
assert "at least 1" in message(cuda.set_capacity, a, 0)
assert message(cuda.set_capacity, a, 1.5).startswith("TypeError")
"""


@needs_stand_in
@programs(PROGRAMS)
def test_program(program):
    run_script(START + program, timeout=300)
