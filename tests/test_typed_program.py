"""A user's program does what its types say. ``.ci/run`` lets mypy and pyright check the types."""

import pytest

import typed_program

pytestmark = pytest.mark.devices("cpu")  # its slots are those of the CPU


@pytest.mark.parametrize("part", ["wrapper", "batches", "composable", "sharded", "tools"])
def test_the_program_runs(part: str) -> None:
    getattr(typed_program, part)()
