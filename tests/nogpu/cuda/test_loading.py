"""Operators of a library that is loaded after the start are computed by their kernels for the CPU."""

from pathlib import Path

import pytest

from processes import run_script
from stand_in import IN_OWN_PROCESSES, programs

pytestmark = [*IN_OWN_PROCESSES, pytest.mark.long, pytest.mark.watchdog(900)]  # the first one compiles

START = f"""
from pathlib import Path
from nogpu import cuda
cuda.stand_in(2)
import torch
from nogpu.compiling import Extension, load_extension, path_of

LATER = Extension("later", "operators of a test", (Path({str(Path(__file__).parent / "later")!r}),), ("-O0",))
x = torch.arange(3.0, device="cuda:1")
later = torch.ops.later

def check(operator, *expected):
    result = operator(x)
    assert result.device == x.device
    assert result.tolist() == list(expected), result

def check_all():
    check(later.both, 1, 2, 3)
    check(later.by_default, 1, 2, 3)
    check(later.only_cuda, -1, -1, -1)
    later.write(x)
    assert x.tolist() == [5, 1, 2]
    try:
        later.only_cpu(x)
    except NotImplementedError as error:
        assert "'CUDA' backend" in str(error)
    else:
        raise AssertionError("an operator without a kernel for CUDA was computed")
"""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    run_script(START + "load_extension(LATER)", timeout=800)


PROGRAMS = """
#: an extension module
load_extension(LATER)
check_all()
#: a library without a module
torch.ops.load_library(path_of(LATER))
check_all()
#: the clocks know what is written
load_extension(LATER)
with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
    try:
        later.write(x)
    except RuntimeError as error:
        assert "race: later::write writes its argument 'x'" in str(error), error
    else:
        raise AssertionError("the operator writes what another stream may still write")
#: kernels that a program registers in python stay
library = torch.library.Library("program", "DEF")
library.define("both(Tensor x) -> Tensor")
library.impl("both", lambda x: x + 1, "CPU")
library.impl("both", lambda x: torch.full_like(x, -1), "CUDA")
load_extension(LATER)
check(torch.ops.program.both, -1, -1, -1)
"""


@programs(PROGRAMS)
def test_program(program):
    run_script(START + program, timeout=800)
