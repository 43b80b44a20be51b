"""Under `late_schedule` a missing wait shows as a wrong value, in every run.

The clocks are off where a wait is missing: the values are a check that does not depend on them.
"""

import json
import re
import textwrap

import pytest

from processes import run_script
from stand_in import IN_OWN_PROCESSES

pytestmark = IN_OWN_PROCESSES

START = """
from nogpu import cuda
a, b, c = cuda.stand_in(3)
import ctypes, torch
from torch.cuda import stream as on
main, side = torch.cuda.default_stream(a), torch.cuda.Stream(a)
main_b, side_b = torch.cuda.default_stream(b), torch.cuda.Stream(b)
def fresh():
    numbers = torch.ones(1000, device=a), torch.zeros(1000, device=a), torch.zeros(1000, device=b)
    torch.cuda.synchronize(a); torch.cuda.synchronize(b)
    return *numbers, torch.zeros(1000, pin_memory=True)
x, y, on_b, h = fresh()
"""

# The name, the value of the program without the line that mends it, the right value, and the program. The value is
# what the elements of `found` are, all of them.
TABLE = """
a copy on a stream that has not waited: 0, not 2
    torch.mul(x, 2, out=y)
    found = torch.zeros_like(h)
    side.wait_stream(main)  # mends
    with on(side): found.copy_(y)
an operator on a stream that has not waited: 1, not 3
    torch.mul(x, 2, out=y)
    side.wait_stream(main)  # mends
    with on(side): found = y + 1
    side.synchronize()
the result of a copy to another device, on a stream that has not waited: 0, not 1
    with on(side_b): on_b.copy_(x, non_blocking=True)
    main_b.wait_stream(side_b)  # mends
    found = on_b + 0
    main_b.synchronize()
elements that are converted on their way to another device: 0, not 1
    here = x[::2].double()
    main.wait_stream(main)
    with on(side_b): on_b[::2].copy_(here, non_blocking=True)
    main_b.wait_stream(side_b)  # mends
    found = on_b[::2] + 0
    main_b.synchronize()
memory that is taken again because record_stream was left out: 10, not 3
    used = x * 2
    side.wait_stream(main)
    with on(side): found = used + 1
    used.record_stream(side)  # mends
    del used
    taken = torch.full((1000,), 9.0, device=a)
    main.synchronize()
    side.synchronize()
an event that was recorded on another stream: 1, not 3
    event = torch.cuda.Event()
    torch.mul(x, 2, out=y)
    event.record(side)
    event.record(main)  # mends
    side.wait_event(event)
    with on(side): found = y + 1
    side.synchronize()
an event that was recorded before the work: 1, not 3
    event = torch.cuda.Event()
    event.record(main)
    torch.mul(x, 2, out=y)
    event.record(main)  # mends
    side.wait_event(event)
    with on(side): found = y + 1
    side.synchronize()
the host reads pinned memory before it is filled: 0, not 1
    h.copy_(x, non_blocking=True)
    main.synchronize()  # mends
    found = h.clone()
the host writes pinned memory before it is read: 7, not 0
    y.copy_(h, non_blocking=True)
    main.synchronize()  # mends
    h.fill_(7)
    found = y
memory that a copy still reads is written: 9, not 1
    with on(side): found = x.clone()
    main.wait_stream(side)  # mends
    x.fill_(9)
    main.synchronize()
    side.synchronize()
a collective on a stream that has not waited: 0, not 2
    with on(side): torch.mul(x, 2, out=y)
    main.wait_stream(side)  # mends
    torch.cuda.nccl.broadcast([y, on_b])
    found = on_b
a stream that does not wait for the default stream: 1, not 3
    handle, flags = ctypes.c_void_p(), 1
    flags = 0  # mends
    ctypes.CDLL("libcudart.so.13").cudaStreamCreateWithFlags(ctypes.byref(handle), flags)
    other = torch.cuda.ExternalStream(handle.value, a)
    torch.mul(x, 2, out=y)
    with on(other): found = y + 1
    other.synchronize()
"""
FAULTS = [
    (name, int(wrong), int(right), textwrap.dedent(program))
    for name, wrong, right, program in re.findall(
        r"^(\S.*): (\d+), not (\d+)\n((?:    .*\n)+)", TABLE, flags=re.MULTILINE
    )
]


@pytest.fixture(scope="module")
def found() -> dict[str, list[list[float]]]:
    """The values of each program late without its wait, late with it, and without it where work is done at once."""
    programs = {}
    for name, _, _, program in FAULTS:
        faulty = "\n".join(line for line in program.splitlines() if not line.endswith("# mends"))
        programs[name] = [faulty, program, faulty]
    script = f"""
import contextlib, json
results = {{}}
for name, programs in {programs!r}.items():
    results[name] = []
    for program, late in zip(programs, (True, True, False)):
        x, y, on_b, h = fresh()
        names = {{**globals()}}
        with cuda.clocks(False), cuda.late_schedule() if late else contextlib.nullcontext():
            exec(program, names)
            values = names["found"].tolist()
        results[name].append(sorted(set(values)))
        del names
print(json.dumps(results))
"""
    return json.loads(run_script(START + script, timeout=300))


@pytest.mark.parametrize(
    ("name", "wrong", "right"), [pytest.param(name, wrong, right, id=name) for name, wrong, right, _ in FAULTS]
)
def test_a_missing_wait_shows_as_a_wrong_value_in_a_late_schedule_only(name, wrong, right, found):
    late, mended, at_once = found[name]
    assert late == [wrong]
    assert mended == [right]
    assert at_once == [right]
