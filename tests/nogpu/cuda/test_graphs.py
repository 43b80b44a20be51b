"""Captured graphs on the stand-in: what a replay computes, what the clocks see of it, and what a capture forbids."""

import pytest

from processes import run_script
from stand_in import IN_OWN_PROCESSES, programs

pytestmark = [*IN_OWN_PROCESSES, pytest.mark.usefixtures("compiled_libraries")]

START = """
from nogpu import cuda
a, b = cuda.stand_in(2)
import threading, torch
from torch import nn
from torch.cuda import stream as on
x, y = torch.ones(1000, device=a), torch.zeros(1000, device=a)
side = torch.cuda.Stream(a)
torch.cuda.synchronize(a)

def captured(function, mode="global", stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        result = function()
    return graph, result

def message(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        texts = [str(error)]
        while error := error.__context__:  # what went wrong inside of a capture, which torch then ends
            texts.append(str(error))
        return " ".join(texts)

def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start(); thread.join()
"""

PROGRAMS = """
#: a replay computes with what is in memory then
graph, result = captured(lambda: y.add_(x).mul(2))
assert y.sum() == 0  # nothing was done
graph.replay()
assert y.sum() == 1000 and result.sum() == 2000
x.fill_(3)
graph.replay(); graph.replay()
assert y.sum() == 7000 and result.sum() == 14000
cuda.check_clocks()
#: copies and fills are captured
h = torch.full((1000,), 5.0).pin_memory()
back = torch.zeros(1000).pin_memory()
def moves():
    x.copy_(h, non_blocking=True)
    y.zero_()
    y.add_(x)
    back.copy_(y, non_blocking=True)
graph, _ = captured(moves)
graph.replay()
torch.cuda.current_stream(a).synchronize()
assert back.sum() == 5000
cuda.check_clocks()
#: memory of a graph may be freed after a replay on another stream, because only captures take it
graph, results = captured(lambda: [x.mul(2), x.mul(3)])
graph.replay()
results.clear()
cuda.check_clocks()
#: memory of a user's pool may not, because the next allocation takes it
with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
    with on(side): result = x.mul(2)
    torch.cuda.current_stream(a).wait_stream(side)
    result.mul(3)
    del result
    assert "freed too early" in message(cuda.check_clocks)
#: draws differ between replays and follow the seed
def dropped():
    return nn.functional.dropout(x, 0.5)
graph, result = captured(dropped)
def draws():
    torch.cuda.manual_seed(7)
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(result.clone())
    return masks + [torch.rand(5, device=a)]
first, again = draws(), draws()
assert all(map(torch.equal, first, again))
assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
assert 300 < (first[0] == 0).sum() < 700
torch.cuda.manual_seed(7)
assert torch.equal(dropped(), first[0])  # as without a graph
#: streams fork and join within a graph
def forked():
    main = torch.cuda.current_stream(a)
    side.wait_stream(main)
    with on(side):
        z = x * 3
    w = x + 1
    main.wait_stream(side)
    return w + z
graph, result = captured(forked)
graph.replay()
assert result.sum() == 5000
x.fill_(2)
graph.replay()
assert result.sum() == 9000
cuda.check_clocks()
#: what nothing orders within a graph is a race when it is launched
def racing():
    main = torch.cuda.current_stream(a)
    side.wait_stream(main)
    with on(side):
        y.add_(1)
    y.mul_(2)
    main.wait_stream(side)
graph, _ = captured(racing)
assert "race" in message(graph.replay)
#: a replay on a stream that does not wait is a race
graph, result = captured(lambda: x + 1)
torch.cuda.synchronize(a)
x.fill_(2)
with on(side):
    assert "race" in message(graph.replay)
torch.cuda.synchronize(a)
#: replays of one graph come one after another on any streams
graph, result = captured(lambda: y.add_(1))
torch.cuda.synchronize(a)
for _ in range(2):
    with on(side):
        graph.replay()
    graph.replay()
assert y.sum() == 4000
cuda.check_clocks()
#: memory that is freed before a replay
z = torch.ones(30 << 20, device=a)
graph, _ = captured(lambda: y.add_(z[:1000]))
del z
torch.cuda.empty_cache()
assert "memory that has been freed since it was captured" in message(graph.replay)
del graph
torch.cuda.synchronize(a)
#: a timeline counts a launch as one call of the host
m = torch.ones(64, 64, device=a)
graph, _ = captured(lambda: [m.mm(m).add_(m) for _ in range(3)])  # before the first recording of the process
with cuda.timeline() as recorded:
    x.add_(1)
    graph.replay()
    graph.replay()
    x.add_(1)
launches = recorded.recording.launches
first, again = (next(l.index for l in launches if "mm" in l.op and l.index > after) for after in (0, 6))
assert [l.graph for l in launches] == [None] + [first] * 6 + [again] * 6 + [None] and (first, again) == (1, 7)
assert recorded.recording.calls == 4
assert {l.flops for l in launches if "mm" in l.op} == {2 * 64**3}
assert all(l.host_seconds == 0 for l in launches if not l.is_call)
#: a timeline after a use of NCCL
torch.cuda.nccl.all_reduce([x, torch.ones(1000, device=b)])
graph, _ = captured(lambda: x.add_(x).mul_(2))
with cuda.timeline() as recorded:
    graph.replay()
assert [(l.op, l.bytes_written) for l in recorded.recording.launches] == [("aten::add_", 4000), ("aten::mul_", 4000)]
"""

FORBIDDEN = """
#: operators and copies after what has made a capture invalid
said = []
def goes_on():
    for function in (lambda: x.sum().item(), lambda: x * 2, lambda: y.copy_(x), lambda: x.nonzero()):
        try:
            function()
        except torch.AcceleratorError as error:
            said.append((error.error_code, str(error).split("\\n")[0]))
invalid = (901, "CUDA error: operation failed due to a previous error during capture")
assert invalid[1] in message(captured, goes_on)
assert said[0] == (900, "CUDA error: operation not permitted when stream is capturing")
assert said[1:] == [invalid] * 3, said
graph, result = captured(lambda: x * 2)
graph.replay()
assert result.sum() == 2000
#: a shape depends on values
assert "cannot capture aten::nonzero" in message(captured, lambda: x.nonzero())
#: pageable memory
assert "CUDA" in message(captured, lambda: x.copy_(torch.ones(1000), non_blocking=True))
#: what the stand-in does when it is called names itself
sparse = torch.eye(3).to_sparse().to(a)
assert "the stand-in for CUDA cannot capture" in message(captured, lambda: sparse + sparse)
#: a stream that is not joined
def unjoined():
    side.wait_stream(torch.cuda.current_stream(a))
    with on(side):
        y.add_(1)
assert "unjoined work" in message(captured, unjoined)
y.add_(1)
torch.cuda.synchronize(a)
#: work from before the capture
event = torch.cuda.Event()
with on(side):
    event.record()
assert "dependency created on uncaptured work in another stream" in message(
    captured, lambda: torch.cuda.current_stream(a).wait_event(event))
#: another thread asks while a capture is global or of its thread
event = torch.cuda.Event()
event.record()
said = []
def other_thread_asks():
    y.add_(1)
    in_thread(lambda: said.append(message(event.query)))
assert "captur" in message(captured, other_thread_asks)
assert "operation not permitted when stream is capturing" in said[0]
graph, _ = captured(other_thread_asks, mode="thread_local")
assert said[1:] == [None]
graph.replay()
assert y.sum() == 1000
#: another thread waits for the whole device, in every mode
for mode in ("global", "thread_local", "relaxed"):
    said = []
    def other_thread_waits():
        y.add_(1)
        in_thread(lambda: said.append(message(torch.cuda.synchronize, a)))
    assert "captur" in message(captured, other_thread_waits, mode)
    assert "operation not permitted when stream is capturing" in said[0]
def other_thread_waits():
    y.add_(1)
    in_thread(lambda: said.append(message(torch.cuda.synchronize, b)))
graph, _ = captured(other_thread_waits, mode="thread_local")
assert said[-1] is None  # of another device
#: the legacy stream joins a capture
def joins():
    event = torch.cuda.Event()
    event.record()
    torch.cuda.default_stream(a).wait_event(event)
assert "legacy stream depend on a capturing" in message(captured, joins)
#: work of the legacy stream while a stream captures that waits for it
import cudart
blocking = torch.cuda.ExternalStream(cudart.made("cudaStreamCreateWithFlags", 0).value, device=a)
def works_in_legacy():
    y.add_(1)
    with on(torch.cuda.default_stream(a)):
        x.add_(1)
assert "legacy stream depend on a capturing" in message(captured, works_in_legacy, "relaxed", blocking)
captured(works_in_legacy, "relaxed", side)
#: an operator that waits on a GPU only
weights, matrix = torch.rand(10, device=a), torch.eye(3, device=a)
torch.cuda.synchronize(a)
for function in (lambda: x.histc(10), lambda: torch.linalg.svdvals(matrix), lambda: torch.linalg.eigvalsh(matrix)):
    assert "the stand-in for CUDA cannot capture aten::" in message(captured, function)
captured(lambda: x.histc(10, 0, 5))
with cuda.counted() as counts:
    x.histc(10), x.histc(10, 0, 5), weights.multinomial(1), weights.multinomial(2, replacement=True)
assert [wait.call for wait in counts.host_waits] == ["aten::histc", "aten::multinomial"]
"""


@programs(PROGRAMS)
def test_a_graph(program):
    run_script(START + program)


@programs(FORBIDDEN)
def test_a_capture_forbids(program):
    run_script(START + program)
