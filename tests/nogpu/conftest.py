"""What several files of this folder ask for."""

import pytest

from processes import skip_without_tools


@pytest.fixture(scope="module")
def available() -> None:
    """The simulated accelerators can be compiled, or the test is skipped."""
    skip_without_tools()
