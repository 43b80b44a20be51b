"""A table has pointers, counts and chunks where the kernels look for them, and chunks enough for every block."""

import pytest
import torch

from dataparallel.comm.kernels import COPY_KERNEL, SUM_KERNELS, THREADS, KernelLaunch, pack

# They know no slots: once is enough.
pytestmark = pytest.mark.devices("cpu")


def parts_of(launch: KernelLaunch) -> tuple[list[list[int]], list[int], list[int]]:
    """A table taken apart again: rows of pointers, counts, first chunks."""
    entries, tensors = launch.table.tolist(), launch.tensors
    rows = [entries[row * tensors : (row + 1) * tensors] for row in range(launch.rows)]
    at = launch.rows * tensors
    return rows, entries[at : at + tensors], entries[at + tensors :]


def test_a_table_of_a_copy_counts_bytes() -> None:
    rows = [[64, 128, 20_000], [1, 2, 3], [2**47, 2**63 - 1, 0]]
    launch = pack(COPY_KERNEL, rows, [20, 10_000, 16], max_blocks=100)
    assert parts_of(launch) == (rows, [20, 10_000, 16], [0, 1, 4, 5])
    assert launch[:1] + launch[2:] == ("copy_many", 3, 3, THREADS * 16, 5)
    assert launch.table.dtype == torch.int64


def test_a_table_of_a_sum_counts_elements() -> None:
    launch = pack(SUM_KERNELS[torch.float32], [[4, 8], [12, 16]], [5, 6], max_blocks=100)
    assert parts_of(launch) == ([[4, 8], [12, 16]], [5, 6], [0, 1, 2])
    assert launch[:1] + launch[2:] == ("sum_float32", 2, 2, THREADS * 4, 2)


def test_what_has_no_element_has_no_chunk() -> None:
    launch = pack(COPY_KERNEL, [[0, 16, 0, 32, 0]], [0, 5, 0, 5, 0], max_blocks=100)
    assert parts_of(launch)[2] == [0, 0, 1, 1, 2, 2]
    assert launch.blocks == 2


@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_without_any_element_there_is_no_block(counts: list[int]) -> None:
    assert pack(COPY_KERNEL, [counts, counts], counts, max_blocks=100).blocks == 0


@pytest.mark.parametrize("dtype", SUM_KERNELS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_sum_takes_an_element_or_its_real_and_imaginary_part(dtype: torch.dtype) -> None:
    assert dtype.itemsize == SUM_KERNELS[dtype].itemsize * (2 if dtype.is_complex else 1)


@pytest.mark.parametrize("max_blocks", [1, 7, 2_000])
@pytest.mark.parametrize("count", [1, 4_096, 10**6, 10**8])
def test_there_are_as_many_blocks_as_chunks_but_no_more_than_allowed(max_blocks: int, count: int) -> None:
    launch = pack(COPY_KERNEL, [[0], [0]], [count], max_blocks=max_blocks)
    chunks = int(launch.table[-1])
    assert launch.blocks == min(chunks, max_blocks)
    assert (chunks - 1) * launch.chunk < count <= chunks * launch.chunk
    assert launch.chunk % 16 == 0


def test_a_megabyte_is_shared_by_all_blocks() -> None:
    assert pack(COPY_KERNEL, [[0], [0]], [2**20], max_blocks=200).blocks == 128
    assert pack(COPY_KERNEL, [[0], [0]], [2**20], max_blocks=2_000).blocks == 256  # a vector for each thread


def test_what_makes_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one pointer for each of 2 tensors; got rows of \[2, 1\]"):
        pack(COPY_KERNEL, [[0, 0], [0]], [1, 1], max_blocks=1)
