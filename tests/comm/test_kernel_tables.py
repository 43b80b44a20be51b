"""A plan packs what a flat copy expresses, names positions that it does not, and refuses lists that do not match."""

import pytest
import torch
from torch import Tensor, nn

from dataparallel.comm.kernel_tables import SUM_KERNELS, THREADS, Launch, plan_copies, plan_sums

# They know no slots: once is enough.
pytestmark = [pytest.mark.usefixtures("one_intra_op_thread"), pytest.mark.devices("cpu")]


class Subclass(Tensor):
    pass


def with_attribute() -> Tensor:
    tensor = torch.zeros(3)
    tensor.note = "mine"
    return tensor


def rows_of(launch: Launch) -> tuple[list[list[int]], list[int], list[int]]:
    """A table taken apart again: rows of pointers, counts, first chunks."""
    entries, tensors = launch.table.tolist(), launch.tensors
    rows = [entries[row * tensors : (row + 1) * tensors] for row in range(launch.rows)]
    at = launch.rows * tensors
    return rows, entries[at : at + tensors], entries[at + tensors :]


def pointers(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_a_copy_table_has_pointers_bytes_and_chunks() -> None:
    sources = [torch.zeros(5), torch.zeros(10_000, dtype=torch.int8), torch.zeros((), dtype=torch.complex128)]
    destinations = [[torch.empty_like(tensor) for tensor in sources] for _ in range(2)]
    (launch,), left = plan_copies(sources, destinations, max_blocks=100)
    rows, counts, first_chunks = rows_of(launch)
    assert left == []
    assert (launch.kernel, launch.tensors, launch.rows) == ("copy_many", 3, 3)
    assert rows == [pointers(sources), *map(pointers, destinations)]
    assert counts == [20, 10_000, 16]
    assert launch.chunk == THREADS * 16
    assert first_chunks == [0, 1, 4, 5]
    assert launch.blocks == 5
    assert launch.table.dtype == torch.int64


def test_a_sum_table_has_the_result_before_the_slots_and_counts_elements() -> None:
    slots = [[torch.zeros(5), torch.zeros(3, dtype=torch.complex64)] for _ in range(3)]
    out = [torch.empty_like(tensor) for tensor in slots[0]]
    (launch,), left = plan_sums(slots, out, max_blocks=100)
    rows, counts, _ = rows_of(launch)
    assert left == []
    assert launch.kernel == "sum_float32"
    assert rows == [pointers(out), *map(pointers, slots)]
    assert counts == [5, 6]
    assert launch.chunk * 4 == THREADS * 16


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_kernel_of_a_sum_is_launched_once() -> None:
    slots = [[torch.zeros(4, dtype=dtype) for dtype in [*SUM_KERNELS, *SUM_KERNELS]]] * 2
    launches, left = plan_sums(slots, slots[0], max_blocks=10)
    assert left == []
    assert sorted(launch.kernel for launch in launches) == sorted({name for name, _ in SUM_KERNELS.values()})
    assert sum(launch.tensors for launch in launches) == 2 * len(SUM_KERNELS)


@pytest.mark.parametrize("max_blocks", [1, 7, 2_000])
@pytest.mark.parametrize("numel", [1, 4_096, 10**6, 10**8])
def test_there_are_as_many_blocks_as_chunks_but_no_more_than_allowed(max_blocks: int, numel: int) -> None:
    tensor = torch.empty(numel, dtype=torch.uint8)
    (launch,), _ = plan_copies([tensor], [[torch.empty_like(tensor)]], max_blocks=max_blocks)
    chunks = int(launch.table[-1])
    assert launch.blocks == min(chunks, max_blocks)
    assert (chunks - 1) * launch.chunk < numel <= chunks * launch.chunk
    assert launch.chunk % 16 == 0


def test_a_megabyte_is_shared_by_all_blocks() -> None:
    tensor = torch.empty(2**20, dtype=torch.uint8)
    (launch,), _ = plan_copies([tensor], [[torch.empty_like(tensor)]], max_blocks=200)
    assert launch.blocks == 128
    (launch,), _ = plan_copies([tensor], [[torch.empty_like(tensor)]], max_blocks=2_000)
    assert launch.blocks == 256  # a vector for each thread


DENSE = {
    "contiguous": lambda: torch.zeros(2, 3),
    "parameter": lambda: nn.Parameter(torch.zeros(3)),
    "scalar": lambda: torch.zeros(()),
    "transposed": lambda: torch.zeros(2, 3).t(),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "part of a buffer": lambda: torch.zeros(10)[3:7],
}
NOT_FLAT = {
    "holes": lambda: torch.zeros(6)[::2],
    "repeated": lambda: torch.zeros(1).expand(3),
    "subclass": lambda: torch.zeros(3).as_subclass(Subclass),
    "attribute": with_attribute,
    "sparse": lambda: torch.zeros(3).to_sparse(),
    "sparse rows": lambda: torch.zeros(3, 3).to_sparse_csr(),
    "negative": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag.clone()._neg_view(),
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE)
def test_dense_memory_is_flat_whatever_its_strides(make: object) -> None:
    assert plan_copies([make()], [[make()], [make()]], max_blocks=1).left == []
    assert plan_sums([[make()], [make()]], [make()], max_blocks=1).left == []


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("make", NOT_FLAT.values(), ids=NOT_FLAT)
def test_positions_that_are_not_flat_are_left(make: object) -> None:
    odd, plain = make(), torch.zeros(make().shape, dtype=make().dtype)
    for source, destination in ((odd, plain), (plain, odd)):
        (launch,), left = plan_copies([plain, source, plain], [[plain, destination, plain]], max_blocks=1)
        assert left == [1]
        assert launch.tensors == 2
        (launch,), left = plan_sums([[plain, source]], [plain, destination], max_blocks=1)
        assert left == [1]
        assert launch.tensors == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left() -> None:
    nested, plain = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), torch.zeros(3)
    (launch,), left = plan_copies([nested, plain], [[nested, plain]], max_blocks=1)
    assert left == [0]
    assert launch.tensors == 1


def test_strides_that_differ_are_left() -> None:
    assert plan_copies([torch.zeros(2, 3)], [[torch.zeros(3, 2).t()]], max_blocks=1) == ([], [0])
    assert plan_copies([torch.zeros(2, 3).t()], [[torch.zeros(2, 3).t()], [torch.zeros(3, 2)]], max_blocks=1)[1] == [0]


def test_the_stride_of_one_element_does_not_matter() -> None:
    column = torch.zeros(3, 2, 4).permute(0, 2, 1)[:, :, :1].clone(memory_format=torch.preserve_format)
    other = torch.zeros(3, 4, 1).as_strided((3, 4, 1), (4, 1, 999))
    assert plan_copies([column], [[other]], max_blocks=1).left == []
    transposed = torch.zeros(4, 3).t().unsqueeze(-1), torch.zeros(12).as_strided((3, 4, 1), (1, 3, 999))
    assert plan_copies([transposed[0]], [[transposed[1]]], max_blocks=1).left == []


def test_dtypes_without_a_sum_are_left() -> None:
    tensors = [torch.zeros(3), torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.float8_e5m2)]
    assert plan_sums([tensors], tensors, max_blocks=1).left == [1, 2]


def test_a_sum_leaves_memory_that_is_not_aligned_to_its_elements() -> None:
    aligned, odd = torch.zeros(4), torch.frombuffer(bytearray(20), dtype=torch.float32, offset=1, count=4)
    assert plan_sums([[aligned, odd]], [aligned, aligned], max_blocks=1).left == [1]


def test_tensors_without_elements_need_no_launch() -> None:
    empty = torch.zeros(0, 3)
    assert plan_copies([empty], [[empty]], max_blocks=1) == ([], [])
    assert plan_sums([[empty]], [empty], max_blocks=1) == ([], [])
    assert plan_copies([], [[], []], max_blocks=1) == ([], [])
    (launch,), _ = plan_copies([empty, torch.zeros(3)], [[empty, torch.zeros(3)]], max_blocks=1)
    assert launch.tensors == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: plan_copies([t, t], [[t, t], [t]], max_blocks=1),
            r"destinations\[1\] has 1 tensors, sources has 2",
        ),
        (
            lambda t: plan_copies([t, t], [[t, t], [t, torch.zeros(4)]], max_blocks=1),
            r"destinations\[1\]\[1\] has shape \(4,\) and dtype torch.float32, sources\[1\] \(3,\) and torch.float32",
        ),
        (
            lambda t: plan_sums([[t], [t.double()]], [t], max_blocks=1),
            r"slots\[1\]\[0\] has shape \(3,\) and dtype torch.float64, out\[0\] \(3,\) and torch.float32",
        ),
        (lambda t: plan_sums([[t]], [], max_blocks=1), r"slots\[0\] has 1 tensors, out has 0"),
        (lambda t: plan_sums([], [t], max_blocks=1), "at least one slot; got none"),
        (lambda t: plan_copies([t], [[t]], max_blocks=0), "at least 1; got 0"),
    ],
)
def test_lists_that_do_not_match_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3))
