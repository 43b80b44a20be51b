"""Results of the cupy transport are those of plain copies, and the kernels get all that they can read where it lies.

The real kernels run on the memory of CPU and simulated devices, compiled for the CPU; on a GPU CuPy launches them.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_launches import Launches, assert_alike, made
from tensor_kinds import with_attribute
from torch import Tensor

from dataparallel.comm import kernels
from dataparallel.comm.kernels import Cupy
from dataparallel.comm.routes import STAR

pytestmark = pytest.mark.slots(3)

CPU = torch.device("cpu")
KERNELS = Cupy()


@pytest.mark.parametrize("own", [False, True])
def test_a_broadcast(own: bool, launches: Launches, slots: list, root: torch.device) -> None:
    devices = [*map(torch.device, slots), root, torch.device(slots[-1])]
    tensors = made(root)
    results = KERNELS.broadcast_coalesced(tensors, devices, own=own)
    expected = STAR.broadcast_coalesced(tensors, devices, 2**20, own=own)
    for mine, theirs in zip(results, expected, strict=True):
        assert_alike(mine, theirs)
    assert all(copy is tensor for copy, tensor in zip(results[0], tensors, strict=True))
    if own:
        for position in (k for k, tensor in enumerate(tensors) if tensor.numel() > 0):
            storages = [(r[position]._values() if r[position].is_sparse else r[position]) for r in results]
            assert len({storage.untyped_storage().data_ptr() for storage in storages}) == len(devices)
    else:
        assert all(copy is other for copy, other in zip(results[-1], results[len(slots) - 1], strict=True))
    if own or len({*devices}) > 1:
        assert launches.kinds() == {"copy_many": 3}, "one for each dtype"
        assert launches.tensors() == len(tensors) - 3, "all but the sparse, the repeated and the one with holes"


def test_nothing_is_launched_where_nothing_is_copied_or_added(launches: Launches, root: torch.device) -> None:
    tensors = made(root)
    found = [
        *KERNELS.broadcast_coalesced(tensors, [root, root], own=False),
        KERNELS.reduce_add_coalesced([tensors], root),
    ]
    for results in found:
        assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
    assert launches.noted == []


def test_what_is_written_has_changed_for_autograd(launches: Launches, slots: list) -> None:
    """The writes of a kernel, which autograd does not see, are told it."""
    targets = [torch.zeros(3, device=slot) for slot in slots]
    weight = torch.ones(3, device=slots[-1], requires_grad=True)
    loss = (weight * targets[-1]).sum()
    KERNELS.broadcast_into(targets, torch.ones(3, device=slots[0]))
    assert launches.kinds() == {"copy_many": 1}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def overlapping(tensor: Tensor) -> list[Tensor]:
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return [memory[:-1].view(tensor.shape), memory[1:].view(tensor.shape)]


# What `broadcast_into` is given, and how many of its targets kernels write.
INTO: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], list[Tensor]], int]] = {
    "contiguous": (lambda: torch.randn(4, 3), lambda t: [torch.zeros(4, 3), torch.zeros(4, 3)], 2),
    "one of other strides": (lambda: torch.randn(4, 3), lambda t: [torch.zeros(4, 3), torch.zeros(3, 4).t()], 0),
    "transposed": (lambda: torch.randn(3, 4).t(), lambda t: [torch.zeros(3, 4).t()], 1),
    "one of another dtype": (lambda: torch.randn(5), lambda t: [torch.zeros(5, dtype=torch.half), torch.zeros(5)], 0),
    "holes": (lambda: torch.randn(8)[::2], lambda t: [torch.zeros(8)[::2], torch.zeros(4)], 0),
    "repeated": (lambda: torch.randn(1).expand(4), lambda t: [torch.zeros(4)], 0),
    "conjugate": (lambda: torch.ones(3, dtype=torch.cfloat).mul(1j).conj(), lambda t: [torch.zeros_like(t)], 0),
    "sparse": (lambda: torch.eye(3).to_sparse(), lambda t: [torch.zeros(3, 3).to_sparse()], 0),
    "itself": (lambda: torch.randn(4), lambda t: [t, torch.zeros(4)], 0),
    "twice the same": (lambda: torch.randn(4), lambda t: [torch.zeros(4)] * 2, 0),
    "overlapping": (lambda: torch.randn(4), overlapping, 0),
    "misaligned": (lambda: misaligned(4), lambda t: [torch.zeros(4), misaligned(4).zero_()], 2),
    "bytes of any dtype": (lambda: torch.tensor([True, False]), lambda t: [torch.zeros(2, dtype=torch.bool)], 1),
    "empty": (lambda: torch.empty(0, 3), lambda t: [torch.empty(0, 3)], 1),
    "nowhere": (lambda: torch.randn(3), lambda t: [], 0),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("name", INTO)
def test_kernels_write_into_tensors_that_all_lie_alike_and_plain_copies_into_others(
    name: str, launches: Launches
) -> None:
    make, room, count = INTO[name]
    tensor = make()
    out, expected = room(tensor), room(tensor)
    KERNELS.broadcast_into(out, tensor)
    assert sum(len(rows) - 1 for _, rows, _ in launches.noted) == count
    STAR.broadcast_into(expected, tensor)
    assert_alike(out, expected)


def misaligned(numel: int = 4) -> Tensor:
    tensor = torch.frombuffer(bytearray(4 * numel + 4), dtype=torch.float32, offset=1, count=numel)
    return tensor.copy_(torch.arange(float(numel)))


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "holes": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "misaligned": lambda tensor: moved_by_a_byte(tensor),
    "attribute": lambda tensor: with_attribute(tensor.clone()),
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
