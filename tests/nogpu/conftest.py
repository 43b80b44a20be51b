"""Fixtures that several files of this folder use."""

import pytest
from torch.utils import cpp_extension

from nogpu.compiling import ToolsMissing, check_tools
from nogpu.simulated.extension import EXTENSION
from processes import skip_without_tools


@pytest.fixture(scope="module")
def available() -> None:
    """The simulated accelerators can be compiled, or the test is skipped."""
    skip_without_tools()


@pytest.fixture
def compiler() -> str:
    """The C++ compiler. Skips the test if any tool for compiling is missing."""
    try:
        check_tools(EXTENSION)
    except ToolsMissing as error:
        pytest.skip(str(error))
    return cpp_extension.get_cxx_compiler()
