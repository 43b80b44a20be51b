"""The CUDA kernels copy and sum as torch does on the CPU, to the bit, and write nowhere else; launched on one device.

`test_kernels` has the same promises for the kernels compiled for the CPU.
"""

import pytest
import torch
from arenas import SHORT, SUMMED, Arena, after_copies, after_sums, sizes, table_of, to_copy, to_sum, with_one_nan
from hypothesis import given, settings
from hypothesis import strategies as st

from dataparallel.comm.kernels import DeviceTable, why_not
from selection import others_long

pytestmark = pytest.mark.devices("cuda")


@pytest.fixture
def device(root: torch.device) -> torch.device:
    """Where the kernels run."""
    if (reason := why_not([root])) is not None:
        pytest.skip(reason)
    return root


def launched(device: torch.device, target: Arena, terms: list[Arena], dtype: torch.dtype) -> None:
    """Executes the table on the device; the arenas then have what lies in its memory."""
    arenas = list(dict.fromkeys([target, *terms]))
    memory = {arena: arena.bytes.to(device) for arena in arenas}
    DeviceTable(table_of(target, terms, dtype), device, dtype).launch(
        [memory[arena].view(dtype) for arena in (target, *terms)]
    )
    for arena in arenas:
        arena.bytes = memory[arena].cpu()


@settings(max_examples=10 * settings().max_examples)
@given(drawn=sizes(), aligned=st.booleans())
def test_copies_have_the_bits_of_their_sources_and_nothing_else_is_written(
    device: torch.device, drawn: tuple, aligned: bool
) -> None:
    source, target = to_copy(*drawn, aligned)
    before, expected = source.bytes, after_copies(source, target)
    launched(device, target, [source], torch.uint8)
    assert torch.equal(source.bytes, before)
    assert torch.equal(target.bytes, expected)


@pytest.mark.parametrize("dtype", others_long(SUMMED, SHORT), ids=lambda dtype: str(dtype).removeprefix("torch."))
@settings(max_examples=5 * settings().max_examples)
@given(
    drawn=sizes(),
    count=st.integers(1, 8),
    aligned=st.booleans(),
    kind=st.sampled_from(["bits", "ordinary", "subnormal", "edges"]),
    in_place=st.booleans(),
)
def test_sums_have_the_bits_of_torch_and_nothing_else_is_written(
    device: torch.device, dtype: torch.dtype, drawn: tuple, count: int, aligned: bool, kind: str, in_place: bool
) -> None:
    slots, out = to_sum(dtype, drawn, count, aligned, kind, in_place)
    expected = after_sums(slots, out)
    unchanged = [arena.bytes for arena in slots if arena is not out]
    launched(device, out, slots, dtype)
    assert torch.equal(with_one_nan(out), with_one_nan(expected))
    assert all(map(torch.equal, unchanged, [arena.bytes for arena in slots if arena is not out]))
