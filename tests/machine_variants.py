"""In which variants tests of several machines run.

A file of tests takes part if it imports a function that starts ranks. Its tests are long, except those marked `smoke`.

Those marked `detail` send something over a group of torch. With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` they run a second
time, as long tests, only on slots of the CPU: torch then meets all ranks before each collective and compares what they
issue. It waits and fails in other places than without. What the library sends goes over no group of torch.
"""

import pytest

STARTS_RANKS = {"on_machines", "on_mortal_machines", "assert_train_as_one"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "detail: runs with TORCH_DISTRIBUTED_DEBUG=DETAIL too")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not STARTS_RANKS & vars(metafunc.module).keys():
        return
    levels = [pytest.param("OFF")]
    if metafunc.config.getoption("--devices") == "cpu" and metafunc.definition.get_closest_marker("detail"):
        levels.append(pytest.param("DETAIL", marks=pytest.mark.long))
    metafunc.parametrize("debug_level", levels, indirect=True)


@pytest.fixture(autouse=True)
def debug_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks of a test find in their environment."""
    if hasattr(request, "param"):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", request.param)
