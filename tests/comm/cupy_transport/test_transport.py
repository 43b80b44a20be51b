"""Results of the cupy transport are those of plain copies, and the kernels carry all flat buffers."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensor_kinds import strides
from torch import Tensor

from clocked import check_clocks, timeline
from dataparallel.comm.kernels import Cupy
from dataparallel.comm.routes import STAR

pytestmark = [pytest.mark.slots(3), pytest.mark.devices("sim", "cuda")]

KERNELS = Cupy()


def made(device: torch.device | str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 3, generator=generator) for _ in range(4)]
    tensors += [torch.randn(5, 4, generator=generator).t()]
    tensors += [torch.arange(7), torch.eye(3).to_sparse(), torch.randn(9, generator=generator).to(torch.bfloat16)]
    tensors += [torch.randn(4, 3, generator=generator), torch.empty(0, 3), torch.tensor(3.0)]
    tensors += [torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)]
    with_holes_and_repeats = [
        torch.arange(10.0).to(device)[::2],
        torch.randn(1, generator=generator).to(device).expand(6),
    ]
    return [tensor.to(device) for tensor in tensors] + with_holes_and_repeats


def assert_alike(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(results, expected, strict=True):
        assert (mine.device, mine.dtype, mine.shape) == (theirs.device, theirs.dtype, theirs.shape)
        assert mine.layout == theirs.layout
        if mine.layout is torch.strided:
            assert strides(mine) == strides(theirs)
        assert torch.equal(mine.to_dense().cpu(), theirs.to_dense().cpu())


def test_one_slot_is_no_launch(peer_devices: list, launches: Counter) -> None:
    root = peer_devices[0]
    tensors = made(root)
    totals = KERNELS.reduce_add_coalesced([tensors], root)
    assert all(total is tensor for total, tensor in zip(totals, tensors, strict=True))
    for copied in KERNELS.broadcast_coalesced(tensors, [root, root], own=False):
        assert all(copy is tensor for copy, tensor in zip(copied, tensors, strict=True))
    assert not launches


@pytest.mark.parametrize("own", [False, True])
def test_a_broadcast(own: bool, peer_devices: list, launches: Counter) -> None:
    devices = [*peer_devices, peer_devices[0], peer_devices[-1]]
    tensors = made(devices[0])
    results = KERNELS.broadcast_coalesced(tensors, devices, own=own)
    expected = STAR.broadcast_coalesced(tensors, devices, 2**20, own=own)
    for mine, theirs in zip(results, expected, strict=True):
        assert_alike(mine, theirs)
    assert launches == {"copy_many": 6}, "one for each dtype and device"


def test_a_sum(peer_devices: list, launches: Counter) -> None:
    inputs = [made(device) for device in peer_devices]
    for k, tensors in enumerate(inputs):
        tensors[:-2] = [tensor * (k + 1) for tensor in tensors[:-2]]
    totals = KERNELS.reduce_add_coalesced(inputs, peer_devices[0])
    assert_alike(totals, STAR.reduce_add_coalesced(inputs, peer_devices[0], 2**20))
    assert launches == {"sum": 2}, "one for each dtype that has a kernel"


CHUNKS = [
    pytest.param(torch.arange(7.0), 0, 1, id="vector"),
    pytest.param(torch.arange(21).view(7, 3), 0, 1, id="rows"),
    pytest.param(torch.arange(21).view(3, 7), 1, 0, id="columns"),
    pytest.param(torch.arange(14).view(2, 7).t(), 0, 0, id="turned"),
    pytest.param(torch.eye(7).to_sparse(), 0, 0, id="sparse"),
]
"""Tensors, a dimension, and how many launches a device needs: plain copies carry what is not contiguous."""


@pytest.mark.parametrize(("tensor", "dim", "count"), CHUNKS)
def test_chunks(tensor: Tensor, dim: int, count: int, peer_devices: list, launches: Counter) -> None:
    whole, (root, *others) = tensor.to(peer_devices[0]), peer_devices
    chunks = KERNELS.scatter(whole, peer_devices, [3, 0, 4], dim)
    assert_alike(chunks, STAR.scatter(whole, peer_devices, [3, 0, 4], dim))
    assert launches == Counter(copy_many=count * len(others))
    launches.clear()
    joined = KERNELS.gather(chunks, dim, root)
    assert_alike([joined], [STAR.gather(chunks, dim, root)])
    assert launches == Counter(copy_many=count)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_launches_come_between_what_all_devices_did_and_do_next(at: int, peer_devices: list) -> None:
    """Otherwise the clocks find a race."""
    flats = [torch.ones(9, device=device).mul_(2) for device in peer_devices]
    total = KERNELS.add_up(flats, peer_devices[at])
    buffers = [torch.zeros(9, device=device).add_(1) for device in peer_devices if device != total.device]
    KERNELS.broadcast_flat(total, buffers)
    for tensor in (*flats, *buffers):
        tensor.add_(1)
    chunks = KERNELS.scatter(buffers[0], peer_devices, [3, 3, 3], 0)
    joined = KERNELS.gather(chunks, 0, peer_devices[at])
    for tensor in (buffers[0], joined, *chunks):
        tensor.add_(1)
    assert all(torch.equal(buffer.cpu(), torch.full((9,), 7.0)) for buffer in buffers[1:])
    assert torch.equal(joined.cpu(), torch.full((9,), 8.0))
    check_clocks()


@pytest.mark.devices("sim", "stand-in")
def test_no_launch_waits_for_that_of_another_device(peer_devices: list) -> None:
    whole = torch.ones(9, device=peer_devices[0])
    KERNELS.scatter(whole, peer_devices, [3, 3, 3], 0)  # makes tables
    with timeline() as recorded:
        KERNELS.scatter(whole, peer_devices, [3, 3, 3], 0)
    first, second = recorded.recording.launches
    assert first.index not in second.waits


def test_what_is_written_has_changed_for_autograd(peer_devices: list) -> None:
    """The writes of a kernel, which autograd does not see, are told it."""
    source, target = torch.ones(3, device=peer_devices[0]), torch.zeros(3, device=peer_devices[1])
    weight = torch.ones(3, device=target.device, requires_grad=True)
    loss = (weight * target).sum()
    KERNELS.broadcast_flat(source, [target])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


SHAPES = [(), (1,), (7,), (4, 4), (3, 5), (0,), (5, 0), (64, 33)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.complex64, torch.bool, torch.float64]
tensors_of_slots = st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.booleans()), max_size=30)


@given(drawn=tensors_of_slots, count=st.integers(2, 3), seed=st.integers(0, 2**32))
def test_any_mix_has_the_bits_of_plain_copies(peer_devices: list, drawn: list, count: int, seed: int) -> None:
    random, devices = torch.Generator().manual_seed(seed), peer_devices[:count]
    inputs: list[list[Tensor]] = [[] for _ in range(count)]
    for shape, dtype, is_turned in drawn:
        for tensors, device in zip(inputs, devices, strict=True):
            values: Any = (torch.randn(shape, generator=random) * 50).to(dtype).to(device)
            tensors.append(values.t().contiguous().t() if is_turned and len(shape) == 2 else values)
    totals = KERNELS.reduce_add_coalesced(inputs, devices[0])
    copied = KERNELS.broadcast_coalesced(inputs[0], devices, own=True)
    assert_alike(totals, STAR.reduce_add_coalesced(inputs, devices[0], 2**30))
    for tensors, expected in zip(copied, STAR.broadcast_coalesced(inputs[0], devices, 2**30, own=True), strict=True):
        assert_alike(tensors, expected)
