"""Results of the cupy transport are those of plain copies, and the kernels carry all flat buffers.

The real kernels run on the memory of CPU and simulated devices, compiled for the CPU; on a GPU CuPy launches them.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_launches import Launches, assert_alike, made
from torch import Tensor

from dataparallel.comm import kernels
from dataparallel.comm.kernels import Cupy
from dataparallel.comm.routes import STAR

pytestmark = pytest.mark.slots(3)

CPU = torch.device("cpu")
KERNELS = Cupy()


def test_one_slot_is_no_launch(launches: Launches, root: torch.device) -> None:
    tensors = made(root)
    totals = KERNELS.reduce_add_coalesced([tensors], root)
    assert all(total is tensor for total, tensor in zip(totals, tensors, strict=True))
    for copied in KERNELS.broadcast_coalesced(tensors, [root, root], own=False):
        assert all(copy is tensor for copy, tensor in zip(copied, tensors, strict=True))
    assert launches.noted == []


@pytest.mark.parametrize("own", [False, True])
def test_a_broadcast(own: bool, launches: Launches, slots: list, root: torch.device) -> None:
    devices = [*map(torch.device, slots), root, torch.device(slots[-1])]
    tensors = made(root)
    results = KERNELS.broadcast_coalesced(tensors, devices, own=own)
    expected = STAR.broadcast_coalesced(tensors, devices, 2**20, own=own)
    for mine, theirs in zip(results, expected, strict=True):
        assert_alike(mine, theirs)
    if len({*devices}) > 1:
        assert launches.kinds() == {"copy_many": 3}, "one for each dtype"


def test_a_sum(launches: Launches, slots: list, root: torch.device) -> None:
    inputs = [made(slot) for slot in slots]
    for k, tensors in enumerate(inputs):
        tensors[:-2] = [tensor * (k + 1) for tensor in tensors[:-2]]
    totals = KERNELS.reduce_add_coalesced(inputs, root)
    assert_alike(totals, STAR.reduce_add_coalesced(inputs, root, 2**20))
    if len({*slots}) > 1:
        assert launches.kinds() == {"sum": 3}, "one for each dtype"


def test_flat_buffers_are_copied_and_added_as_by_other_transports(
    launches: Launches, slots: list, root: torch.device
) -> None:
    """Also where tensors are in flat buffers already."""
    flats = [torch.arange(9.0).to(slot) for slot in slots]
    buffers = [torch.zeros(9, device=slot) for slot in slots[1:]]
    KERNELS.broadcast_flat(flats[0], buffers)
    assert all(torch.equal(buffer.cpu(), torch.arange(9.0)) for buffer in buffers)
    assert torch.equal(KERNELS.add_up(iter(flats), root).cpu(), torch.arange(9.0) * len(slots))
    assert launches.kinds() == {"copy_many": 1, "sum": 1}


def test_what_is_written_has_changed_for_autograd(launches: Launches, slots: list) -> None:
    """The writes of a kernel, which autograd does not see, are told it."""
    targets = [torch.zeros(3, device=slot) for slot in slots]
    weight = torch.ones(3, device=slots[-1], requires_grad=True)
    loss = (weight * targets[-1]).sum()
    KERNELS.broadcast_flat(torch.ones(3, device=slots[0]), targets)
    assert launches.kinds() == {"copy_many": 1}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "holes": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "misaligned": lambda tensor: moved_by_a_byte(tensor),
}
SHAPES = [(), (1,), (7,), (4, 4), (3, 5), (0,), (5, 0), (64, 33)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.complex64, torch.bool, torch.float64]


def moved_by_a_byte(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return tensor
    memory = bytearray(tensor.nbytes + 1)
    return torch.frombuffer(memory, dtype=tensor.dtype, offset=1).reshape(tensor.shape).copy_(tensor)


tensors_of_slots = st.lists(
    st.tuples(
        st.sampled_from(SHAPES),
        st.sampled_from(DTYPES),
        st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=3) | st.just(["as it is"] * 3),
    ),
    max_size=30,
)


@pytest.mark.devices("cpu")
@settings(max_examples=5 * settings().max_examples)
@given(drawn=tensors_of_slots, count=st.integers(2, 3), seed=st.integers(0, 2**32))
def test_any_mix_has_the_bits_of_plain_copies(launch: Callable, drawn: list, count: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    inputs: list[list[Tensor]] = [[] for _ in range(count)]
    for shape, dtype, kinds in drawn:
        for tensors, kind in zip(inputs, kinds, strict=False):
            values = (torch.randn(shape, generator=random) * 50).to(dtype)
            tensors.append(KINDS[kind](values) if len(shape) == 2 or kind != "transposed" else values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "launch", Launches(launch).launch)
        totals = KERNELS.reduce_add_coalesced(inputs, CPU)
        copied = KERNELS.broadcast_coalesced(inputs[0], [CPU] * count, own=True)
    assert_alike(totals, STAR.reduce_add_coalesced(inputs, CPU, 2**30))
    for tensors in copied:
        assert_alike(tensors, inputs[0] if tensors is copied[0] else [tensor.clone() for tensor in inputs[0]])
