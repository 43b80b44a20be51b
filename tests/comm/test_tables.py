"""Plans of tables gather and sum to the bit, whoever executes them: torch, the kernels on the CPU, or a device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runner import Kernels
from torch import Tensor

from clocked import check_clocks
from dataparallel.comm.kernels import SUM_KERNELS, DeviceTable, encoded, kernel_for, pack
from dataparallel.comm.peer_kernels import cut_as_chunks
from dataparallel.comm.tables import Part, Table, all_gather, by_torch, reduce_scatter
from dataparallel.comm.transport import summed_in

ONLY_CPU = pytest.mark.devices("cpu")
SUMMED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]
SIZES = (5, 0, 3, 17, 64, 1)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[list[Part], int, int]:
    """Tensors cut as ``torch.chunk`` cuts them, for 1 to 8 owners, with gaps; the sizes of a shard and of the whole."""
    owners = draw(st.integers(1, 8))
    parts, in_shard, in_full = [], 0, 0
    for _ in range(draw(st.integers(1, 6))):
        rows, width = draw(st.integers(0, 20)), draw(st.integers(1, 30))
        each = -(-rows // owners)
        cut = [min(owner * each, rows) * width for owner in range(owners + 1)]
        parts.append(Part(in_shard, in_full, tuple(end - start for start, end in pairwise(cut))))
        in_shard += each * width + draw(st.integers(0, 9))
        in_full += rows * width + draw(st.integers(0, 9))
    return parts, in_shard, in_full


def random_of(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers whose sums differ with the order."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)
    exponents = torch.randint(-6, 7, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 4.0**exponents).to(dtype)


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


def run_kernel(kernels: Kernels, table: Table, tensors: Sequence[Tensor | None], total_dtype: torch.dtype) -> None:
    dtype = next(tensor.dtype for tensor in tensors if tensor is not None)
    kernel = kernel_for(table, dtype, total_dtype)
    assert kernel is not None
    packed = pack(kernel, *encoded(table, kernel, dtype, total_dtype), max_blocks=3)
    kernels.run(packed, [0 if tensor is None else tensor.data_ptr() for tensor in tensors], threads=7)


@ONLY_CPU
@given(cut=cut_tensors(), dtype=st.sampled_from([*SUMMED, torch.bool]), seed=st.integers(0, 2**32))
def test_a_gather_has_the_bits_of_the_shards(kernels: Kernels, cut: tuple, dtype: torch.dtype, seed: int) -> None:
    parts, in_shard, in_full = cut
    generator = torch.Generator().manual_seed(seed)
    shards = [random_of(in_shard, dtype, generator) for _ in parts[0].counts]
    full = random_of(in_full, dtype, generator)
    expected = gathered(parts, shards, full)
    for slot in range(len(shards)):
        table = all_gather(parts, slot)
        by_torch(table, [*shards, found := full.clone()])
        assert torch.equal(found, expected)
        run_kernel(kernels, table, [*shards, found := full.clone()], dtype)
        assert torch.equal(found, expected)


@ONLY_CPU
@given(
    cut=cut_tensors(), dtype=st.sampled_from(SUMMED), slots=st.integers(2, 10), seed=st.integers(0, 2**32),
    is_wide=st.booleans(), share_missing=st.sampled_from([0, 1, 9]),
)  # fmt: skip
def test_a_sum_adds_in_slot_order_and_leaves_out_what_is_missing(
    kernels: Kernels, cut: tuple, dtype: torch.dtype, slots: int, seed: int, is_wide: bool, share_missing: int
) -> None:
    parts, in_shard, _ = cut
    generator = torch.Generator().manual_seed(seed)
    total_dtype = summed_in(dtype) if is_wide else dtype
    total = random_of(in_shard, total_dtype, generator)
    missing = torch.randint(0, 10, (slots, len(parts)), generator=generator) < share_missing
    grads = [
        [None if missing[slot, at] else random_of(sum(part.counts), dtype, generator) for at, part in enumerate(parts)]
        for slot in range(slots)
    ]
    tensors = [grad for of_slot in grads for grad in of_slot]
    for owner in range(len(parts[0].counts)):
        table, expected = reduce_scatter(parts, owner, slots), summed(parts, owner, grads, total)
        by_torch(table, [*tensors, found := total.clone()])
        assert torch.equal(found, expected)
        if not missing.all():
            run_kernel(kernels, table, [*tensors, found := total.clone()], total_dtype)
            assert torch.equal(found, expected)


@ONLY_CPU
def test_slots_begin_with_distinct_owners() -> None:
    parts = [Part(0, 0, (4, 4, 2)), Part(4, 10, (1, 1, 1))]
    begins = [[row.terms[0].tensor for row in all_gather(parts, slot)] for slot in range(3)]
    assert begins == [[0, 0, 1, 1, 2, 2], [1, 1, 2, 2, 0, 0], [2, 2, 0, 0, 1, 1]]


@ONLY_CPU
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bool])
def test_what_kernels_cannot_add_has_none(dtype: torch.dtype) -> None:
    parts = [Part(0, 0, (2, 2))]
    assert kernel_for(reduce_scatter(parts, 0, 2), dtype, dtype) is None
    assert kernel_for(all_gather(parts), dtype, dtype) is not None
    assert kernel_for(reduce_scatter(parts, 0, 2), torch.float32, torch.float64) is None


# ---- on devices whose kernels read peers -----------------------------------------------------------------------------


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(2, 4, 8)
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_a_device_gathers_and_sums_by_one_launch(peer_devices: list, dtype: torch.dtype) -> None:
    parts, in_shard, in_full = cut_as_chunks(SIZES, len(peer_devices))
    generator = torch.Generator().manual_seed(0)
    shards = [random_of(in_shard, dtype, generator) for _ in peer_devices]
    grads = [[random_of(numel, dtype, generator) for numel in SIZES] for _ in peer_devices]
    grads[1][3] = None
    there = [shard.to(device) for shard, device in zip(shards, peer_devices, strict=True)]
    of_slots = [
        [None if grad is None else grad.to(device) for grad in of_slot]
        for of_slot, device in zip(grads, peer_devices, strict=True)
    ]
    for at, device in enumerate(peer_devices):
        torch.accelerator.synchronize(device)
        full = torch.zeros(in_full, dtype=dtype, device=device)
        DeviceTable(all_gather(parts, at), device, dtype).launch([*there, full])
        assert torch.equal(full.cpu(), gathered(parts, shards, torch.zeros(in_full, dtype=dtype)))
        total = torch.zeros(in_shard, dtype=summed_in(dtype), device=device)
        tensors = [grad for of_slot in of_slots for grad in of_slot]
        DeviceTable(reduce_scatter(parts, at, len(peer_devices)), device, dtype, total.dtype).launch([*tensors, total])
        expected = summed(parts, at, grads, torch.zeros(in_shard, dtype=total.dtype))
        assert torch.equal(total.cpu(), expected)
    check_clocks()


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


@ONLY_CPU
def test_every_dtype_that_is_summed_has_a_kernel_that_gathers() -> None:
    for dtype in SUM_KERNELS:
        assert kernel_for(all_gather([Part(0, 0, (1,))]), dtype, dtype) is not None
