"""`stand_in` opens libraries before torch is imported, and registers operators afterwards, once in a process."""

import pytest

from processes import run_script

pytestmark = pytest.mark.devices("cpu")

STARTED = ["libraries 8 a100", "torch", "register", "knowledge"]


def test_torch_comes_between_the_libraries_and_the_operators(lines):
    script = "from nogpu import cuda; print(cuda.is_stand_in(), cuda.stand_in(), cuda.is_stand_in())"
    *steps, last = lines("-c", script)
    devices = [f"cuda:{index}" for index in range(8)]
    assert [*steps, last] == [*STARTED, f"False {devices} True"]


def test_importing_it_does_not_import_torch():
    run_script("""
import sys
from nogpu import cuda
assert "torch" not in sys.modules
assert not cuda.is_stand_in()
""")


def test_devices_without_links_to_each_other_are_no_peers(lines):
    script = "from nogpu import cuda; cuda.stand_in(2, like='rtx_3090')"
    assert lines("-c", script)[:3] == ["libraries 2 rtx_3090", "0 1 missing", "1 0 missing"]


def test_a_second_call_asks_for_the_same_or_is_refused(lines):
    script = """
from nogpu import cuda
assert cuda.stand_in(2) == cuda.stand_in(2)
for change in ({"devices": 3}, {"devices": 2, "like": "h100"}):
    try:
        cuda.stand_in(**change)
    except ValueError as error:
        print(error)
"""
    *_, other_number, other_kind = lines("-c", script)
    assert other_number.startswith("this process has 2 devices like 'a100' already, which cannot change")
    assert other_number.endswith("got 3 like 'a100'")
    assert other_kind.endswith("got 2 like 'h100'")


def test_what_cannot_be_compiled_is_told_at_each_call(lines):
    script = """
from nogpu import cuda
from nogpu.cuda import extension

def fail():
    raise cuda.ToolsMissing("no compiler")

extension.load = fail
for _ in range(2):
    try:
        cuda.stand_in()
    except cuda.ToolsMissing as error:
        print(error)
"""
    assert lines("-c", script) == ["libraries 8 a100", "torch", "no compiler", "no compiler"]
