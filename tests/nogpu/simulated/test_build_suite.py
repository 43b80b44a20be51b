"""What a run of pytest on simulated devices does if they cannot be compiled."""

from pathlib import Path

import pytest
from torch.utils import cpp_extension

from processes import Ahead, Job, run_pytest

# These tests start their own processes, so one kind of devices is enough.
pytestmark = pytest.mark.devices("cpu")

REFUSING_COMPILER = """#!/bin/sh
case " $* " in *" -c "*) echo "I refuse" >&2; exit 1; esac
exec {} "$@"
"""


@pytest.fixture(scope="module")
def processes(request, tmp_path_factory):
    """Runs a file of these tests on simulated devices. The compiler is a name, or the text of a script."""

    def suite(compiler: str) -> Job:
        folder = tmp_path_factory.mktemp("suite")
        if compiler.startswith("#!"):
            script = folder / "g++"
            script.write_text(compiler)
            script.chmod(0o755)
            compiler = str(script)
        file = Path(__file__).with_name("test_lists.py")
        changes = {"TORCH_EXTENSIONS_DIR": str(folder / "cache"), "CXX": compiler}
        return run_pytest(file.parents[1], "-q", "--devices=sim", str(file), **changes)

    with Ahead(request, tmp_path_factory.mktemp("ahead"), suite) as ahead:
        yield ahead


@pytest.mark.long
@pytest.mark.ahead(REFUSING_COMPILER.format(cpp_extension.get_cxx_compiler()))
def test_a_compiler_that_refuses_ends_the_suite_with_an_error(compiler, result):
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --devices=sim: compiling the simulated accelerators failed*"])
    result.stderr.fnmatch_lines(["*I refuse*"])


@pytest.mark.long
@pytest.mark.ahead("nonexistent-compiler")
def test_without_a_compiler_the_suite_is_skipped_and_says_why(result):
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*this machine lacks a C++ compiler*"])
    assert result.parseoutcomes().keys() == {"skipped"}
