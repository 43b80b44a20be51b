"""torch's own allocators, streams, events and copies on the stand-in for CUDA's runtime, without its operators."""

import pytest

from processes import run, run_script
from stand_in import IN_OWN_PROCESSES, programs

pytestmark = [*IN_OWN_PROCESSES, pytest.mark.usefixtures("compiled_libraries")]

START = """
from nogpu.cuda import libraries
libraries.open_libraries()
import torch
calls = lambda: libraries.counts().calls
"""


PROGRAMS = """
#: pinned memory
host = torch.arange(4.).pin_memory()
assert host.is_pinned() and not torch.arange(4.).is_pinned()
there = host.to("cuda:2", non_blocking=True)
back = torch.empty(4, pin_memory=True)
libraries.forget_counts()
back.copy_(there, non_blocking=True)
assert libraries.counts().host_waits == 0
there.cpu()
assert libraries.counts().host_waits == 1 or calls()["cudaStreamSynchronize"] == 1
torch.cuda.current_stream("cuda:2").synchronize()
assert back.tolist() == [0, 1, 2, 3]
registered = torch.ones(1024)
assert torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), 4096, 0) == 0
assert registered.is_pinned()
assert torch.cuda.cudart().cudaHostUnregister(registered.data_ptr()) == 0
#: the process ends in order
import threading
kept = [torch.empty(10, device=f"cuda:{i}") for i in range(4)]
pinned = torch.empty(10, pin_memory=True)
stream, event = torch.cuda.Stream(), torch.cuda.Event()
event.record(stream)
thread = threading.Thread(target=lambda: kept.append(torch.empty(3, device="cuda:6")))
thread.start(); thread.join()
"""


@programs(PROGRAMS)
def test_program(program):
    run_script(START + program)


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
    done = run(START + body, PYTORCH_CUDA_ALLOC_CONF=setting)
    assert done.returncode == 1
    assert text in done.stderr


def test_too_late():
    done = run("import torch\nfrom nogpu.cuda import libraries\nlibraries.open_libraries()")
    assert done.returncode == 1
    assert "SimulationTooLate: torch has opened CUDA's libraries already" in done.stderr
