"""The CUDA kernels copy and sum as torch does, to the bit, and write nowhere else: on the CPU, and on one device.

Random memory is theirs to copy and sum, with bytes between its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import Kernels
from torch import Tensor

from dataparallel.comm.kernels import SUM_KERNELS, DeviceTable, pack, why_not
from dataparallel.comm.tables import Place, Table, TableRow
from selection import others_long

pytestmark = pytest.mark.devices("cpu", "cuda")

SUMMED = [*dict.fromkeys(dtype for dtype, _ in SUM_KERNELS)]
COPIED = [*SUMMED, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
HALVES = [torch.float16, torch.bfloat16]

PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32}
"""The dtype of a complex number's real and imaginary part."""

# One of each kind of numbers, and the one that is rounded.
SHORT = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


class Arena:
    """Memory of random bytes: tensors lie in it with random gaps, and any write between them is seen."""

    def __init__(self, numels: list[int], dtypes: list[torch.dtype], random: torch.Generator, aligned: bool) -> None:
        self.places: list[tuple[int, int, torch.dtype]] = []
        end = 0
        gaps = torch.randint(1, 40, (len(numels),), generator=random).tolist()
        for numel, dtype, gap in zip(numels, dtypes, gaps, strict=True):
            step = 16 if aligned else dtype.itemsize
            start = -(-(end + gap) // step) * step
            self.places.append((start, numel, dtype))
            end = start + numel * dtype.itemsize
        self.bytes = torch.randint(0, 256, (-(-end // 16) * 16 + 64,), dtype=torch.uint8, generator=random)

    def tensors(self, memory: Tensor | None = None) -> list[Tensor]:
        memory = self.bytes if memory is None else memory
        return [memory[start : start + numel * d.itemsize].view(d) for start, numel, d in self.places]


def table_of(target: Arena, terms: Sequence[Arena], dtype: torch.dtype) -> Table:
    """Adds the tensors of ``terms``, or copies them from one. The table's tensors are the target, then the terms."""
    return [
        TableRow(places[0], tuple(places[1:]), tensor.nbytes // dtype.itemsize)
        for tensor, *starts in zip(target.tensors(), *(arena.places for arena in (target, *terms)), strict=True)
        for places in [[Place(at, start // dtype.itemsize) for at, (start, _, _) in enumerate(starts)]]
    ]


@st.composite
def sizes(draw: st.DrawFn) -> tuple[list[int], torch.Generator]:
    """The numbers of elements of 1 to 200 tensors, and where all else that is random comes from."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = draw(st.one_of(st.integers(1, 8), st.integers(1, 200)))
    largest = draw(st.sampled_from([1, 5, 40, 300, 2_000 if count > 20 else 30_000]))
    # Small ones are as frequent as large ones.
    exponents = torch.rand(count, generator=random)
    return [int((largest + 1) ** exponent - 1 + 1e-6) for exponent in exponents.tolist()], random


def fill(memory: Tensor, dtype: torch.dtype, kind: str, random: torch.Generator) -> None:
    """Values worth adding; ``bits`` leaves random ones, which have NaNs, infinities and exponents far apart."""
    if kind == "bits" or not dtype.is_floating_point:
        return
    info, values = torch.finfo(dtype), memory.view(dtype)
    if kind == "ordinary":
        values.copy_(torch.randn(values.shape, generator=random))
    elif kind == "subnormal":
        scale = 8 * info.smallest_normal
        values.copy_(torch.randn(values.shape, generator=random, dtype=torch.float64) * scale)
    else:
        top, low, small = info.max, info.smallest_normal, info.smallest_normal * info.eps
        edges = [0.0, -0.0, top, -top, top / 2, -top / 2, low, -low, small, -small, 1.0, 1 + info.eps, info.eps / 2]
        edges += [float("inf"), -float("inf"), float("nan"), top * info.eps / 4, -top * info.eps / 4]
        values.copy_(
            torch.tensor(edges, dtype=torch.float64)[torch.randint(0, len(edges), values.shape, generator=random)]
        )


def sum_by_torch(terms: list[Tensor]) -> Tensor:
    """In slot order; halves in float32, rounded once."""
    dtype = terms[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    return total.to(dtype)


def as_summed(tensor: Tensor) -> Tensor:
    """The same memory with the dtype that torch is asked to add."""
    return tensor.view(PARTS.get(tensor.dtype, tensor.dtype))


def with_one_nan(arena: Arena) -> Tensor:
    """The arena's bytes, where every NaN has the same bits."""
    memory = arena.bytes.clone()
    for tensor in map(as_summed, arena.tensors(memory)):
        if tensor.is_floating_point():
            tensor[tensor.isnan()] = float("nan")
    return memory


def to_copy(numels: list[int], random: torch.Generator, aligned: bool) -> tuple[Arena, Arena]:
    """A source and a target with tensors of any dtypes."""
    dtypes = [COPIED[i] for i in torch.randint(0, len(COPIED), (len(numels),), generator=random).tolist()]
    source, target = (Arena(numels, dtypes, random, aligned) for _ in range(2))
    return source, target


def to_sum(
    dtype: torch.dtype, drawn: tuple[list[int], torch.Generator], count: int, aligned: bool, kind: str, in_place: bool
) -> tuple[list[Arena], Arena]:
    """The terms of so many slots, and a target, which is slot 0's arena if ``in_place``. ``kind``: see `fill`."""
    numels, random = drawn
    dtypes = [dtype] * len(numels)
    slots = [Arena(numels, dtypes, random, aligned) for _ in range(count)]
    for arena in slots:
        fill(arena.bytes, PARTS.get(dtype, dtype), kind, random)
    return slots, slots[0] if in_place else Arena(numels, dtypes, random, aligned)


def after_copies(source: Arena, target: Arena) -> Tensor:
    """The bytes of the target after its tensors have been copied from the source."""
    expected = target.bytes.clone()
    for copied, original in zip(target.tensors(expected), source.tensors(), strict=True):
        copied.view(torch.uint8).copy_(original.view(torch.uint8))
    return expected


def after_sums(slots: Sequence[Arena], target: Arena) -> Arena:
    """The target as it is after its tensors have become the sums over the slots."""
    expected = copy(target)
    expected.bytes = target.bytes.clone()
    for total, *terms in zip(expected.tensors(), *(arena.tensors() for arena in slots), strict=True):
        as_summed(total).copy_(sum_by_torch([as_summed(term) for term in terms]))
    return expected


Execute = Callable[..., None]


@pytest.fixture
def execute(request: pytest.FixtureRequest, root: torch.device) -> Execute:
    """Adds the tensors of arenas into a target's, or copies them from one. On the CPU it takes how to launch that."""
    if root.type == "cpu":
        kernels: Kernels = request.getfixturevalue("kernels")

        def run(target: Arena, terms: list[Arena], dtype: torch.dtype, max_blocks: int, **launch: Any) -> None:
            packed = pack(table_of(target, terms, dtype), dtype, dtype, max_blocks=max_blocks)
            kernels.run(packed, [arena.bytes.data_ptr() for arena in (target, *terms)], **launch)

        return run
    if (reason := why_not([root])) is not None:
        pytest.skip(reason)

    def launched(target: Arena, terms: list[Arena], dtype: torch.dtype, *_: Any, **__: Any) -> None:
        arenas = dict.fromkeys([target, *terms])
        memory = {arena: arena.bytes.to(root) for arena in arenas}
        tensors = [memory[arena].view(dtype) for arena in (target, *terms)]
        DeviceTable(table_of(target, terms, dtype), root, dtype).launch(tensors)
        for arena in arenas:
            arena.bytes = memory[arena].cpu()

    return launched


launches = st.fixed_dictionaries(
    {
        "max_blocks": st.sampled_from([1, 2, 13, 1000]),
        "threads": st.sampled_from([1, 7, 32, 256]),
        "backwards": st.booleans(),
    }
)


@settings(max_examples=10 * settings().max_examples)
@given(drawn=sizes(), aligned=st.booleans(), launch=launches)
def test_copies_have_the_bits_of_their_sources_and_nothing_else_is_written(
    execute: Execute, drawn: tuple, aligned: bool, launch: dict
) -> None:
    source, target = to_copy(*drawn, aligned)
    before, expected = source.bytes.clone(), after_copies(source, target)
    execute(target, [source], torch.uint8, **launch)
    assert torch.equal(source.bytes, before)
    assert torch.equal(target.bytes, expected)


@pytest.mark.parametrize("dtype", others_long(SUMMED, SHORT), ids=lambda dtype: str(dtype).removeprefix("torch."))
@settings(max_examples=3 * settings().max_examples)
@given(
    drawn=sizes(),
    count=st.integers(1, 8),
    aligned=st.booleans(),
    kind=st.sampled_from(["bits", "ordinary", "subnormal", "edges"]),
    in_place=st.booleans(),
    launch=launches,
)
def test_sums_have_the_bits_of_torch_and_nothing_else_is_written(
    execute: Execute,
    dtype: torch.dtype,
    drawn: tuple,
    count: int,
    aligned: bool,
    kind: str,
    in_place: bool,
    launch: dict,
) -> None:
    slots, out = to_sum(dtype, drawn, count, aligned, kind, in_place)
    expected = after_sums(slots, out)
    unchanged = [arena.bytes.clone() for arena in slots if arena is not out]
    execute(out, slots, dtype, **launch)
    assert torch.equal(with_one_nan(out), with_one_nan(expected))
    assert all(map(torch.equal, unchanged, [arena.bytes for arena in slots if arena is not out]))


@pytest.mark.devices("cpu")
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


@pytest.mark.devices("cpu")
def test_a_megabyte_is_shared_by_all_blocks() -> None:
    table = [TableRow(Place(1, 0), (Place(0, 0),), 2**20)]
    assert pack(table, torch.uint8, torch.uint8, max_blocks=200).blocks == 128
    assert pack(table, torch.uint8, torch.uint8, max_blocks=2_000).blocks == 256  # a vector for each thread
