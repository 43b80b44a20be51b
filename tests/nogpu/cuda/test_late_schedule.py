"""What waits under `late_schedule`, and what makes it be done.

`test_late_faults` has programs that lack a wait, and `nogpu/test_clocks_graphs` random ones.
"""

from processes import run_script
from stand_in import IN_OWN_PROCESSES, programs

pytestmark = IN_OWN_PROCESSES

START = """
from nogpu import cuda
a, b, c = cuda.stand_in(3)
import threading, torch
from torch.cuda import stream as on
main, side = torch.cuda.default_stream(a), torch.cuda.Stream(a)
main_b, side_b = torch.cuda.default_stream(b), torch.cuda.Stream(b)
x, y, on_b = torch.ones(1000, device=a), torch.zeros(1000, device=a), torch.zeros(1000, device=b)
h = torch.zeros(1000, pin_memory=True)
torch.cuda.synchronize(a); torch.cuda.synchronize(b)
def message(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


PROGRAMS = """
#: what is done when
with cuda.late_schedule() as schedule:
    waiting = lambda: schedule.counts().waiting
    y = x + 1
    z = y.mul(3)
    h.copy_(z, non_blocking=True)
    assert waiting() == 3 and h.sum() == 0 and not schedule.counts().at_once
    with on(side): other = x - 1
    assert waiting() == 4
    main.synchronize()
    assert waiting() == 1 and h.sum() == 6000  # the other stream is as late as before
    event = main.record_event()
    y.add_(1)
    done = main.record_event()
    with cuda.late_queries():
        assert not done.query() and not main.query() and waiting() == 2
    assert event.query() and waiting() == 2
    assert done.query() and waiting() == 1
    assert z.sum().item() == 6000 and waiting() == 1
    with on(side): there = other.to(b, non_blocking=True)
    main_b.synchronize()
    assert waiting() == 0 and there.sum().item() == 0
    h.copy_(y, non_blocking=True)
assert h.sum() == 3000 and schedule.counts().waiting == 0
h.copy_(x, non_blocking=True)
assert h.sum() == 1000  # at once again
#: what cannot wait is done at once after its stream
with cuda.late_schedule() as schedule:
    torch.mul(x, 2, out=y)
    with on(side): late = x + 1
    assert y.nonzero().shape == (1000, 1)
    assert (y > 1).sum().item() == 1000 and y[y > 1].shape == (1000,)
    assert y.to_sparse().values().sum().item() == 2000
    assert y.unique().tolist() == [2]
    assert torch.quantize_per_tensor(y, 0.5, 0, torch.qint8).dequantize().sum().item() == 2000
    assert schedule.counts().waiting == 1
    at_once = schedule.counts().at_once
    for name in ("nonzero", "_unique2", "quantize_per_tensor"):
        assert at_once["aten::" + name] == 1, at_once
#: the host may change what it has passed
import numpy
with cuda.late_schedule() as schedule:
    pageable, number, index = torch.full((1000,), 5.0), torch.tensor(3.0), torch.tensor([1, 2])
    y.copy_(pageable, non_blocking=True)
    z = x * number
    row = x.index_select(0, torch.tensor([1, 2], device=a)) + x[index]
    assert schedule.counts().waiting >= 3
    pageable.fill_(0), number.fill_(0), index.fill_(10 ** 9)
    assert y.sum().item() == 5000 and z.sum().item() == 3000 and row.tolist() == [2, 2]
#: numbers are drawn as where work is done at once
def draw():
    torch.manual_seed(3)
    first = torch.rand(1000, device=a)
    second = torch.nn.functional.dropout(first, 0.5)
    third = torch.randn(1000, device=a).bernoulli_(0.3)
    q = torch.randn(1, 2, 8, 16, device=a, requires_grad=True)
    fourth = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    fourth.sum().backward()
    return [first, second, third, fourth.detach(), q.grad]
expected = draw()
with cuda.late_schedule() as schedule:
    found = draw()
    assert schedule.counts().postponed > 10
    for ours, theirs in zip(found, expected): torch.testing.assert_close(ours, theirs)
#: errors
weight, indices = torch.ones(10, 2, device=a), torch.tensor([3, 10 ** 6], device=a)
with cuda.late_schedule():
    said = message(lambda: torch.mm(x.view(10, 100), x.view(10, 100)))
    assert "shapes cannot be multiplied" in said, said
    said = message(lambda: x + on_b)
    assert "two devices" in said, said
    torch.index_select(weight, 0, indices)  # the shape is right
    said = message(torch.cuda.synchronize, a)
    assert "aten::index_select" in said and "out of range" in said, said
    assert (x + 1).sum().item() == 2000
def ends_with_an_error():
    with cuda.late_schedule():
        torch.index_select(weight, 0, indices)
        y.fill_(4)
said = message(ends_with_an_error)
assert "aten::index_select" in said and "out of range" in said, said
said = message(torch.index_select, weight, 0, indices)
assert "out of range" in said, said
assert y.sum().item() == 4000
#: memory that is given back to the device waits for all streams
big = torch.full((1 << 22,), 2.0, device=a)
on_b = torch.zeros(1 << 22, device=b)
torch.cuda.synchronize(a); torch.cuda.synchronize(b)
with cuda.late_schedule() as schedule, cuda.clocks(False):
    with on(side_b): on_b.copy_(big, non_blocking=True)
    with on(side): found = big * 3
    del big
    assert schedule.counts().waiting > 1
    torch.cuda.empty_cache()
    assert schedule.counts().waiting == 0
    assert on_b.mean().item() == 2 and found.mean().item() == 6
#: the clocks say what they say without it
with cuda.late_schedule():
    torch.mul(x, 2, out=y)
    with on(side): said = message(lambda: y + 1)
assert "race: aten::add reads its argument 'self'" in said, said
torch.cuda.synchronize(a)
"""


@programs(PROGRAMS)
def test_program(program):
    run_script(START + program, timeout=300)


def test_the_environment_makes_a_process_late_from_its_start():
    script = f"""{START}
h.copy_(x, non_blocking=True)
print(int(h.sum()))
main.synchronize()
print(int(h.sum()))
"""
    assert run_script(script, timeout=300, NOGPU_LATE_SCHEDULE="1").split() == ["0", "1000"]
    assert run_script(script, timeout=300, NOGPU_LATE_SCHEDULE="0").split() == ["1000", "1000"]
