"""The CUDA kernels copy and sum as torch does, to the bit, and write nowhere else; run on the CPU, thread by thread."""

import pytest
import torch
from arenas import SHORT, SUMMED, Arena, after_copies, after_sums, sizes, table_of, to_copy, to_sum, with_one_nan
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import Kernels

from dataparallel.comm.kernels import KernelLaunch, pack
from dataparallel.comm.tables import Place, TableRow
from selection import others_long

# They know no slots: once is enough.
pytestmark = pytest.mark.devices("cpu")

launches = st.fixed_dictionaries(
    {"threads": st.sampled_from([1, 7, 32, 256]), "backwards": st.booleans()},
)
blocks = st.sampled_from([1, 2, 13, 1000])


def executing(target: Arena, terms: list[Arena], dtype: torch.dtype, max_blocks: int) -> tuple[KernelLaunch, list[int]]:
    """The launch that adds the tensors of ``terms``, or copies them from one, and the addresses of the arenas."""
    launch = pack(table_of(target, terms, dtype), dtype, dtype, max_blocks=max_blocks)
    return launch, [arena.bytes.data_ptr() for arena in (target, *terms)]


@settings(max_examples=10 * settings().max_examples)
@given(drawn=sizes(), max_blocks=blocks, aligned=st.booleans(), launch=launches)
def test_copies_have_the_bits_of_their_sources_and_nothing_else_is_written(
    kernels: Kernels, drawn: tuple, max_blocks: int, aligned: bool, launch: dict
) -> None:
    source, target = to_copy(*drawn, aligned)
    before, expected = source.bytes.clone(), after_copies(source, target)
    kernels.run(*executing(target, [source], torch.uint8, max_blocks), **launch)
    assert torch.equal(source.bytes, before)
    assert torch.equal(target.bytes, expected)


@pytest.mark.parametrize("dtype", others_long(SUMMED, SHORT), ids=lambda dtype: str(dtype).removeprefix("torch."))
@given(
    drawn=sizes(),
    count=st.integers(1, 8),
    max_blocks=blocks,
    aligned=st.booleans(),
    kind=st.sampled_from(["bits", "ordinary", "subnormal", "edges"]),
    in_place=st.booleans(),
    launch=launches,
)
def test_sums_have_the_bits_of_torch_and_nothing_else_is_written(
    kernels: Kernels,
    dtype: torch.dtype,
    drawn: tuple,
    count: int,
    max_blocks: int,
    aligned: bool,
    kind: str,
    in_place: bool,
    launch: dict,
) -> None:
    slots, out = to_sum(dtype, drawn, count, aligned, kind, in_place)
    expected = after_sums(slots, out)
    unchanged = [arena.bytes.clone() for arena in slots if arena is not out]
    kernels.run(*executing(out, slots, dtype, max_blocks), **launch)
    assert torch.equal(with_one_nan(out), with_one_nan(expected))
    assert all(map(torch.equal, unchanged, [arena.bytes for arena in slots if arena is not out]))


@pytest.mark.parametrize(("dtype", "dropped"), [(torch.float16, 13), (torch.bfloat16, 16)])
def test_floats_of_every_kind_are_rounded_as_torch_does(kernels: Kernels, dtype: torch.dtype, dropped: int) -> None:
    """All that is kept with what decides how the rest rounds, NaNs of any bits among them."""
    kept = torch.arange(-(2 ** (31 - dropped)), 2 ** (31 - dropped), dtype=torch.int64) << dropped
    half = 1 << (dropped - 1)
    rest = torch.tensor([0, 1, half - 1, half, half + 1, 2 * half - 1])
    sums = (kept[:, None] + rest).to(torch.int32).view(torch.float32).flatten()
    actual, expected = kernels.narrow(sums, dtype), sums.to(dtype)
    assert torch.equal(actual.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(actual.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


def test_a_megabyte_is_shared_by_all_blocks() -> None:
    table = [TableRow(Place(1, 0), (Place(0, 0),), 2**20)]
    assert pack(table, torch.uint8, torch.uint8, max_blocks=200).blocks == 128
    assert pack(table, torch.uint8, torch.uint8, max_blocks=2_000).blocks == 256  # a vector for each thread
