"""Plans of tables gather and sum to the bit, whoever executes them: torch, the kernels on the CPU, or a device.

Nothing else is written. On the CPU the CUDA kernels are compiled by a C++ compiler.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import Kernels
from tensor_kinds import devices_of
from torch import Tensor

from clocked import check_clocks
from dataparallel.comm import tables
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.kernels import SUM_KERNELS, DeviceTable, kernel_for, pack, why_not
from dataparallel.comm.routes import STAR
from dataparallel.comm.tables import Part, Place, Table, TableRow, TensorRow, all_gather, reduce_scatter, summed_in
from dataparallel.comm.transport import Transport

pytestmark = pytest.mark.slots(8)
ONLY_CPU = pytest.mark.devices("cpu")
SUMMED = [*dict.fromkeys(dtype for dtype, _ in SUM_KERNELS)]
COPIED = [*SUMMED, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex32]
PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
"""The dtype of a complex number's real and imaginary part."""

Execute: TypeAlias = "Callable[[Table, Sequence[Tensor | None], dict], object]"
"""Executes a table. The last tensor is the target. The rest is how kernels are launched on the CPU."""

launches = st.fixed_dictionaries(
    {
        "max_blocks": st.sampled_from([1, 2, 13, 1000]),
        "threads": st.sampled_from([1, 7, 32, 256]),
        "backwards": st.booleans(),
    }
)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[list[Part], int, int, int]:
    """Tensors cut as ``torch.chunk`` cuts them, for 1 to 8 owners, with gaps; the sizes of a shard and of the whole.

    The last number is 16 if each tensor begins at a multiple of so many elements, where kernels use vectors, else 1.
    """
    owners, unit = draw(st.integers(1, 8)), draw(st.sampled_from([1, 16]))
    parts, in_shard, in_full = [], 0, 0
    for _ in range(draw(st.integers(1, 6))):
        rows = draw(st.integers(0, 20) | st.integers(0, 400))
        width = draw(st.integers(1, 30) | st.sampled_from([16, 32]))
        each = -(-rows // owners)
        cut = [min(owner * each, rows) * width for owner in range(owners + 1)]
        parts.append(Part(in_shard, in_full, tuple(end - start for start, end in pairwise(cut))))
        in_shard += -(-(each * width + draw(st.integers(0, 9))) // unit) * unit
        in_full += -(-(rows * width + draw(st.integers(0, 9))) // unit) * unit
    return parts, in_shard, in_full, unit


KINDS = st.sampled_from(["ordinary", "bits", "subnormal", "edges", "zeros"])
"""Of floats: ``bits`` are random ones, which have NaNs, infinities and exponents far apart."""


class Draws:
    """Draws numbers whose sums differ with the order, some elements after the begin of memory of their own.

    ``unit``: they begin at a multiple of so many elements. ``kind``: see `KINDS`.
    """

    def __init__(self, seed: int, unit: int = 1, kind: str = "ordinary") -> None:
        self._generator, self._unit, self._kind = torch.Generator().manual_seed(seed), unit, kind

    def integer(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self._generator))

    def tensor(self, numel: int, dtype: torch.dtype, margin: int = 0) -> Tensor:
        """``margin``: elements before and after it."""
        first, size = margin + self.integer(4) * self._unit, numel + 2 * margin + 4 * self._unit
        if dtype.is_floating_point or dtype.is_complex:
            part = PARTS.get(dtype, dtype)
            return self.floats(size * dtype.itemsize // part.itemsize, part).view(dtype)[first : first + numel]
        return torch.randint(100, (size,), generator=self._generator).to(dtype)[first : first + numel]

    def floats(self, count: int, dtype: torch.dtype) -> Tensor:
        if self._kind == "bits":
            nbytes = count * dtype.itemsize
            return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=self._generator).view(dtype)
        if self._kind == "zeros":  # of both signs
            return torch.tensor([0.0, -0.0])[torch.randint(2, (count,), generator=self._generator)].to(dtype)
        info = torch.finfo(dtype)
        top, low, small = info.max, info.smallest_normal, info.smallest_normal * info.eps
        if self._kind == "edges":
            edges = [0.0, top, top / 2, top * info.eps / 4, low, small, 1.0, 1 + info.eps, info.eps / 2, math.inf]
            table = torch.tensor([*edges, *(-edge for edge in edges), math.nan], dtype=torch.float64)
            return table[torch.randint(len(table), (count,), generator=self._generator)].to(dtype)
        values = torch.randn(count, generator=self._generator, dtype=torch.float64)
        exponents = torch.randint(-6, 7, (count,), generator=self._generator)
        return (values * (8 * low if self._kind == "subnormal" else 4.0**exponents)).to(dtype)


def beside(tensor: Tensor, elements: int, numel: int) -> Tensor:
    """``numel`` elements of the same memory, from ``elements`` after the first one on."""
    return tensor.as_strided((numel,), (1,), tensor.storage_offset() + elements)


def placed(tensors: Sequence[Tensor | None], devices: Sequence[torch.device]) -> list[Tensor | None]:
    """Copies of tensors on devices. Those on one device that share memory share it there too."""
    copies: dict[tuple[int, torch.device], Tensor] = {}

    def there(tensor: Tensor, device: torch.device) -> Tensor:
        storage = tensor.untyped_storage()
        if (key := (storage.data_ptr(), device)) not in copies:
            copies[key] = torch.empty(0, dtype=tensor.dtype).set_(storage).to(device, copy=True)
        return copies[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    found = [None if t is None else there(t, device) for t, device in zip(tensors, devices, strict=True)]
    for device in {device for _, device in copies} - {torch.device("cpu")}:
        torch.accelerator.synchronize(device)
    return found


def gathered(parts: Sequence[Part], shards: Sequence[Tensor], full: Tensor) -> Tensor:
    """What a gather makes of ``full``, element by element."""
    expected = full.clone()
    for part in parts:
        starts = [*accumulate(part.counts, initial=part.in_full)]
        for shard, start, count in zip(shards, starts, part.counts, strict=False):
            expected[start : start + count] = shard[part.in_shard : part.in_shard + count]
    return expected


def summed(parts: Sequence[Part], owner: int, grads: Sequence[Sequence[Tensor | None]], total: Tensor) -> Tensor:
    """What a sum makes of ``total``: terms are added in slot order and rounded once."""
    expected = total.clone()
    for at, part in enumerate(parts):
        start, count = sum(part.counts[:owner]), part.counts[owner]
        terms = [of_slot[at][start : start + count] for of_slot in grads if of_slot[at] is not None]
        if terms:
            added = terms[0].to(summed_in(terms[0].dtype))
            for term in terms[1:]:
                added = added + term
            expected[part.in_shard : part.in_shard + count] = added
    return expected


def by_copies(table: Table, tensors: Sequence[Tensor | None], launch: dict) -> None:
    """Terms without a tensor and rows without terms are no part."""

    def elements(place: Place, numel: int) -> Tensor:
        tensor = tensors[place.tensor]
        assert tensor is not None
        return tensor.as_strided((numel,), (1,), tensor.storage_offset() + place.first)

    rows = [
        TensorRow(
            elements(target, numel), [elements(term, numel) for term in terms if tensors[term.tensor] is not None]
        )
        for target, terms, numel in table
    ]
    STAR.execute([row for row in rows if row.terms])


def by_kernel(table: Table, tensors: Sequence[Tensor | None], launch: dict, kernels: Kernels | None = None) -> None:
    """Executes a table by a kernel: of the target's device, or of the CPU."""
    *terms, target = tensors
    dtype = next((term.dtype for term in terms if term is not None), None)
    if dtype is None:
        return
    if kernels is None:
        DeviceTable(table, target.device, dtype, target.dtype).launch(tensors)
        return
    max_blocks, how = launch["max_blocks"], {name: value for name, value in launch.items() if name != "max_blocks"}
    packed = pack(table, dtype, target.dtype, max_blocks=max_blocks)
    kernels.run(packed, [0 if tensor is None else tensor.data_ptr() for tensor in tensors], **how)


@pytest.fixture
def devices(request: pytest.FixtureRequest, slots: list) -> list[torch.device]:
    """Eight: on accelerators those whose kernels read peers, or the only one."""
    found = [*map(torch.device, slots)]
    if len({*found}) > 1:
        request.getfixturevalue("peer_devices")
    elif found[0].type != "cpu" and (reason := why_not(found[:1])) is not None:
        pytest.skip(reason)
    return found


@pytest.fixture
def executors(request: pytest.FixtureRequest, devices: list[torch.device]) -> list[Execute]:
    """All that can execute a table on these devices."""
    if devices[0].type == "cpu":
        return [by_copies, partial(by_kernel, kernels=request.getfixturevalue("kernels"))]
    return [by_copies, by_kernel]


def check(
    executors: Sequence[Execute],
    table: Table,
    tensors: Sequence[Tensor | None],
    devices: Sequence[torch.device],
    expected: Tensor,
    launch: dict,
    is_sum: bool = False,
) -> None:
    """The last tensor has the bits ``expected`` when any of ``executors`` has executed the table, and all else stays.

    Of a sum that is no number any bits will do.
    """
    for execute in executors:
        if execute is by_copies and is_sum and expected.dtype.itemsize == 2:
            continue  # kernels alone round a sum once
        execute(table, there := placed(tensors, devices), launch)
        target = there[-1]
        assert target is not None
        wanted = all_of(tensors[-1]).clone()
        beside(wanted, tensors[-1].storage_offset(), len(expected)).copy_(expected)
        bits = of_numbers if is_sum else bytes_of
        assert torch.equal(bits(all_of(target).cpu()), bits(wanted))
        for found, before in zip(there, tensors, strict=True):
            if found is not None and found.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
                assert torch.equal(bytes_of(all_of(found).cpu()), bytes_of(all_of(before)))
    check_clocks()


def all_of(tensor: Tensor) -> Tensor:
    """The memory that the tensor is a part of."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def of_numbers(tensor: Tensor) -> Tensor:
    """The bytes, where every NaN has the same bits."""
    numbers = tensor.view(PARTS.get(tensor.dtype, tensor.dtype)).clone()
    numbers[numbers.isnan()] = math.nan
    return bytes_of(numbers)


PLACES = st.lists(st.integers(0, 7), min_size=8, max_size=8)
"""For each slot a device, some of them repeatedly."""


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=3 * settings().max_examples)
@given(
    cut=cut_tensors(), dtype=st.sampled_from(COPIED), places=PLACES, seed=st.integers(0, 2**32),
    shared=st.sampled_from(["nothing", "shards", "own rows"]), kind=KINDS, launch=launches,
)  # fmt: skip
def test_a_gather_has_the_bits_of_the_shards(
    executors: list[Execute],
    devices: list[torch.device],
    cut: tuple,
    dtype: torch.dtype,
    places: list[int],
    seed: int,
    shared: str,
    kind: str,
    launch: dict,
) -> None:
    parts, in_shard, in_full, unit = cut
    draws, counts = Draws(seed, unit, kind), parts[0].counts
    shards = [draws.tensor(in_shard, dtype) for _ in counts]
    full = draws.tensor(in_full, dtype, margin=in_shard)
    if shared == "shards":
        shards = [shards[0]] * len(counts)
    on = [devices[place] for place in places[: len(counts)]]
    for slot in range(len(counts)):
        if shared == "own rows" and len(parts) == 1:  # they may lie there already
            shards[slot] = beside(full, sum(counts[:slot]) - parts[0].in_shard, in_shard)
        table, expected = all_gather(parts, slot), gathered(parts, shards, full)
        check(executors, table, [*shards, full], [*on, on[slot]], expected, launch)


@settings(max_examples=3 * settings().max_examples)
@given(
    cut=cut_tensors(), dtype=st.sampled_from(SUMMED), slots_of_sum=st.integers(1, 8), places=PLACES,
    is_wide=st.booleans(), share_missing=st.sampled_from([0, 1, 9]), seed=st.integers(0, 2**32),
    shared=st.sampled_from(["nothing", "gradients", "the total"]), kind=KINDS, launch=launches,
)  # fmt: skip
def test_a_sum_adds_in_slot_order_and_leaves_out_what_is_missing(
    executors: list[Execute],
    devices: list[torch.device],
    cut: tuple,
    dtype: torch.dtype,
    slots_of_sum: int,
    places: list[int],
    is_wide: bool,
    share_missing: int,
    seed: int,
    shared: str,
    kind: str,
    launch: dict,
) -> None:
    parts, in_shard, in_full, unit = cut
    kind = "ordinary" if dtype.is_complex else kind  # torch makes NaNs of infinite complex numbers
    draws, total_dtype = Draws(seed, unit, kind), summed_in(dtype) if is_wide else dtype
    total = draws.tensor(in_shard, total_dtype, margin=in_full)
    grads = [
        [None if draws.integer(10) < share_missing else draws.tensor(sum(part.counts), dtype) for part in parts]
        for _ in range(slots_of_sum)
    ]
    if shared == "gradients":
        grads[-1] = grads[0]
    on = [devices[place] for place in places[:slots_of_sum]]
    for owner in range(len(parts[0].counts)):
        if shared == "the total" and dtype == total_dtype:  # slot 0's gradients are added to in place
            grads[0] = [beside(total, part.in_shard - sum(part.counts[:owner]), sum(part.counts)) for part in parts]
        table, expected = reduce_scatter(parts, owner, slots_of_sum), summed(parts, owner, grads, total)
        tensors = [grad for of_slot in grads for grad in of_slot]
        places_of_terms = [device for device in on for _ in parts]
        target = on[0] if shared == "the total" else devices[places[owner]]
        check(executors, table, [*tensors, total], [*places_of_terms, target], expected, launch, is_sum=True)


def test_a_copy_from_memory_that_does_not_exist_writes_nothing(
    executors: list[Execute], devices: list[torch.device]
) -> None:
    tensors = [None, torch.ones(2), torch.arange(4.0)]
    launch = {"max_blocks": 3, "threads": 7, "backwards": False}
    check(executors, all_gather([Part(0, 0, (2, 2))]), tensors, devices[:3], torch.tensor([0.0, 1, 1, 1]), launch)


# ---- rows of tensors, which every transport copies and adds ---------------------------------------------------------

TRANSPORTS = st.sampled_from([STAR, ThroughHost()])


@pytest.fixture
def everyone(make_slots: Callable[[int], list]) -> list[torch.device]:
    return devices_of(make_slots(8))


@st.composite
def cut_wholes(draw: st.DrawFn) -> tuple[Tensor, list[int], int]:
    """A tensor whose dimensions lie in any order, the sizes of 1 to 8 parts of it, and the dimension that is cut."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    dim, order = draw(st.integers(-len(shape), len(shape) - 1)), draw(st.permutations(range(len(shape))))
    shape[dim] = sum(sizes)
    values = Draws(draw(st.integers(0, 2**32))).tensor(math.prod(shape), draw(st.sampled_from(COPIED)))
    return torch.empty_permuted(shape, order, dtype=values.dtype).copy_(values.view(shape)), sizes, dim


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(drawn=cut_wholes(), places=PLACES, transport=TRANSPORTS)
def test_parts_are_scattered_and_gathered_and_a_whole_is_broadcast(
    everyone: list[torch.device], drawn: tuple, places: list[int], transport: Transport
) -> None:
    whole, sizes, dim = drawn
    parts = torch.split(whole, sizes, dim)
    on = [everyone[place] for place in places]
    there, back = whole.to(on[0]), torch.zeros_like(whole, device=on[-1])
    scattered = [torch.zeros_like(part, device=device) for part, device in zip(parts, on, strict=False)]
    copies = [torch.zeros_like(whole, device=device) for device in on]
    transport.execute(tables.copies(scattered, torch.split(there, sizes, dim)))
    transport.execute(tables.copies(torch.split(back, sizes, dim), scattered))
    transport.execute(tables.copies(copies, [there] * len(copies)))
    for found, expected in zip([*scattered, back, *copies], [*parts, *[whole] * 9], strict=True):
        assert torch.equal(bytes_of(found.cpu()), bytes_of(expected))
    check_clocks()


@given(
    drawn=st.tuples(st.integers(1, 8), st.integers(0, 40), st.sampled_from(SUMMED), st.sampled_from([0, 2**22])),
    places=PLACES, transport=TRANSPORTS, seed=st.integers(0, 2**32),
)  # fmt: skip
def test_rows_of_matrices_are_added_in_slot_order(
    everyone: list[torch.device], drawn: tuple, places: list[int], transport: Transport, seed: int
) -> None:
    slots_of_sum, columns, dtype, sent_on_another_stream_above = drawn
    draws, on, wide = Draws(seed), [everyone[place] for place in places], summed_in(dtype)
    matrices = [draws.tensor(8 * columns, dtype).view(8, columns) for _ in range(slots_of_sum)]
    there = [matrix.to(device) for matrix, device in zip(matrices, on, strict=False)]
    out = [torch.full((columns,), 7, dtype=wide, device=device) for device in on]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataparallel.comm.transport._OVERLAP_ABOVE_BYTES", sent_on_another_stream_above)
        transport.execute([TensorRow(row, [matrix[at] for matrix in there]) for at, row in enumerate(out)])
    expected = functools.reduce(torch.add, [matrix.to(wide) for matrix in matrices])
    assert torch.equal(torch.stack([row.cpu() for row in out]), expected)
    assert all(map(torch.equal, [matrix.cpu() for matrix in there], matrices))
    check_clocks()


@ONLY_CPU
def test_slots_begin_with_distinct_owners() -> None:
    parts = [Part(0, 0, (4, 4, 2)), Part(4, 10, (1, 1, 1))]
    begins = [[row.terms[0].tensor for row in all_gather(parts, slot)] for slot in range(3)]
    assert begins == [[0, 0, 1, 1, 2, 2], [1, 1, 2, 2, 0, 0], [2, 2, 0, 0, 1, 1]]


@ONLY_CPU
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bool, torch.int64])
def test_what_kernels_cannot_add_has_none(dtype: torch.dtype) -> None:
    assert kernel_for(dtype, dtype, 2) is None
    assert kernel_for(dtype, dtype, 1) is not None
    assert kernel_for(torch.float32, torch.float64, 2) is None


@ONLY_CPU
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


@ONLY_CPU
def test_a_megabyte_is_shared_by_all_blocks() -> None:
    table = [TableRow(Place(1, 0), (Place(0, 0),), 2**20)]
    assert pack(table, torch.uint8, torch.uint8, max_blocks=200).blocks == 128
    assert pack(table, torch.uint8, torch.uint8, max_blocks=2_000).blocks == 256  # a vector for each thread


# ---- on devices whose kernels read peers -----------------------------------------------------------------------------


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(2)
def test_shifts_say_where_the_table_begins_in_each_tensor(peer_devices: list) -> None:
    parts = [Part(0, 0, (3, 2))]
    values = [torch.arange(20.0, device=device) * (10 * at + 1) for at, device in enumerate(peer_devices)]
    total = torch.zeros(3, device=peer_devices[1])
    torch.accelerator.synchronize(peer_devices[0])
    DeviceTable(reduce_scatter(parts, 1, 2), peer_devices[1], torch.float32).launch([*values, total], [4, 10, 1])
    assert total.tolist() == [0.0, 7 + 11 * 13, 8 + 11 * 14]


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.slots(2)
def test_a_kernel_orders_no_stream_but_its_own(peer_devices: list) -> None:
    """Who launches it orders the streams of the peers: without that, the clocks find a race."""
    shards = [torch.ones(4, device=device) for device in peer_devices]
    torch.accelerator.synchronize(peer_devices[0])
    table = DeviceTable(all_gather([Part(0, 0, (4, 4))]), peer_devices[0], torch.float32)
    full = torch.zeros(8, device=peer_devices[0])
    shards[1].add_(1)
    with pytest.raises(RuntimeError, match="race"):
        table.launch([*shards, full])
