"""Results of the cupy transport are those of plain copies, and the kernels get all that they can read where it lies.

The real kernels run on the memory of CPU and simulated devices, compiled for the CPU; on a GPU CuPy launches them.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_launches import Launches, assert_alike, made
from tensor_kinds import tagged, with_attribute
from torch import Tensor, nn

from dataparallel.comm import kernels
from dataparallel.comm.kernels import Cupy
from dataparallel.comm.routes import STAR

pytestmark = pytest.mark.slots(3)

CPU = torch.device("cpu")
KERNELS = Cupy()


def pointers(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_addresses_are_those_of_sources_and_results(
    monkeypatch: pytest.MonkeyPatch, slots: list, root: torch.device
) -> None:
    """Nothing is launched: a wrong address would end the process."""
    launches = Launches(lambda *arguments: None)
    monkeypatch.setattr(kernels, "launch", launches.launch)
    shapes = [(3, 4), (5,), (3, 4), (8, 2), (1,), (5,), (3, 4)]
    inputs = [[torch.randn(shape).to(slot) for shape in shapes] for slot in slots]
    copied = KERNELS.broadcast_coalesced(inputs[0], [root, *map(torch.device, slots)], own=True)
    totals = KERNELS.reduce_add_coalesced(inputs, root)
    (_, (sources, *rows), nbytes), (_, (out, *terms), numels) = launches.noted
    order = [sources.index(pointer) for pointer in pointers(inputs[0])]
    assert [nbytes[k] for k in order] == [tensor.nbytes for tensor in totals]
    assert [numels[k] for k in order] == [tensor.numel() for tensor in totals]
    for row, tensors in zip([sources, *rows, out, *terms], [*copied, totals, *inputs], strict=True):
        assert [row[k] for k in order] == pointers(tensors)


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
    if own or len({*devices}) > 1:
        assert launches.kinds() == {"copy_many": 3}, "one for each dtype"
        assert launches.tensors() == len(tensors) - 3, "all but the sparse, the repeated and the one with holes"


def test_slots_on_one_device_share_what_was_copied_there(launches: Launches, slots: list, root: torch.device) -> None:
    devices = [torch.device(slots[0]), torch.device(slots[-1]), torch.device(slots[-1])]
    results = KERNELS.broadcast_coalesced(made(root), devices, own=False)
    assert all(copy is other for copy, other in zip(results[1], results[2], strict=True))


def test_a_sum(launches: Launches, slots: list, root: torch.device) -> None:
    inputs = [made(slot) for slot in slots]
    for k, tensors in enumerate(inputs):
        tensors[:-2] = [tensor * (k + 1) for tensor in tensors[:-2]]
    totals = KERNELS.reduce_add_coalesced(inputs, root)
    assert_alike(totals, STAR.reduce_add_coalesced(inputs, root, 2**20))
    assert launches.kinds() == {"sum": 3}, "one for each dtype"
    assert launches.tensors() == len(totals) - 3, "all but the sparse, the repeated and the one with holes"


def test_one_slot_is_no_launch(launches: Launches, root: torch.device) -> None:
    tensors = made(root)
    totals = KERNELS.reduce_add_coalesced([tensors], root)
    assert all(total is tensor for total, tensor in zip(totals, tensors, strict=True))
    assert launches.noted == []


def test_what_stays_where_it_is_is_no_launch(launches: Launches, root: torch.device) -> None:
    tensors = made(root)
    for copied in KERNELS.broadcast_coalesced(tensors, [root, root], own=False):
        assert all(copy is tensor for copy, tensor in zip(copied, tensors, strict=True))
    assert launches.noted == []


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


def test_each_tensor_of_the_caller_is_asked_once_and_no_result(
    launch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [[torch.randn(k % 5 + 1) for k in range(40)] for _ in range(3)]
    asked: list[Tensor] = []
    data_ptr = Tensor.data_ptr

    def noted(tensor: Tensor) -> int:
        asked.append(tensor)
        return data_ptr(tensor)

    monkeypatch.setattr(kernels, "launch", Launches(lambda *arguments: None).launch)
    monkeypatch.setattr(Tensor, "data_ptr", noted)
    KERNELS.reduce_add_coalesced(inputs, CPU)
    of_inputs = Counter(id(tensor) for tensors in inputs for tensor in tensors)
    assert Counter(map(id, asked[:-1])) == of_inputs
    assert asked[-1].shape == (sum(tensor.numel() for tensor in inputs[0]),), "the buffer of the results"


def misaligned(numel: int = 4) -> Tensor:
    tensor = torch.frombuffer(bytearray(4 * numel + 4), dtype=torch.float32, offset=1, count=numel)
    return tensor.copy_(torch.arange(float(numel)))


DENSE = {
    "contiguous": lambda: torch.randn(2, 3),
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "scalar": lambda: torch.randn(()),
    "transposed": lambda: torch.randn(2, 3).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "part of a buffer": lambda: torch.randn(10)[3:7],
    "one element of any stride": lambda: torch.randn(12).as_strided((3, 4, 1), (4, 1, 999)),
    "empty": lambda: torch.empty(0, 3),
}
COPIED_ONLY = {
    "bool": lambda: torch.tensor([True, False]),
    "8-bit floats": lambda: torch.zeros(3, dtype=torch.float8_e5m2),
    "misaligned": misaligned,
}
NOT_FLAT = {
    "holes": lambda: torch.randn(6)[::2],
    "repeated": lambda: torch.randn(1).expand(3),
    "subclass": lambda: tagged(torch.randn(3)),
    "attribute": lambda: with_attribute(torch.arange(3.0)),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "sparse rows": lambda: torch.ones(3, 3).to_sparse_csr(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag.clone()._neg_view(),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
}


def placed(make: Callable[[], Tensor]) -> list[Tensor]:
    """The tensor between plain ones; of its shape too, so that it stands within a run."""
    odd = make()
    plain = torch.arange(float(odd.numel())).reshape(odd.shape)
    return [plain, odd, plain + 1, torch.ones(2), plain + 2]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", [*DENSE, *COPIED_ONLY, *NOT_FLAT])
@pytest.mark.devices("cpu")
def test_kernels_copy_what_is_dense_and_plain_copies_the_rest(name: str, launches: Launches) -> None:
    tensors = placed({**DENSE, **COPIED_ONLY, **NOT_FLAT}[name])
    results = KERNELS.broadcast_coalesced(tensors, [CPU, CPU], own=True)
    assert_alike(results[1], STAR.broadcast_coalesced(tensors, [CPU, CPU], 2**20, own=True)[1])
    assert launches.tensors() == (4 if name in NOT_FLAT else 5)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("name", [*DENSE, *sorted(NOT_FLAT.keys() - {"sparse rows"}), "bool", "misaligned"])
@pytest.mark.devices("cpu")
def test_kernels_sum_what_is_dense_on_every_slot(name: str, slot: int, launches: Launches) -> None:
    make = {**DENSE, **COPIED_ONLY, **NOT_FLAT}[name]
    inputs = [placed(make) for _ in range(4)]
    if name not in DENSE:
        # One slot's is enough.
        for k in {*range(4)} - {slot}:
            inputs[k][1] = torch.arange(make().numel()).reshape(make().shape).to(make().dtype)
    totals = KERNELS.reduce_add_coalesced(inputs, CPU)
    assert_alike(totals, STAR.reduce_add_coalesced(inputs, CPU, 2**20))
    assert launches.tensors() == (5 if name in DENSE else 4)


@pytest.mark.devices("cpu")
def test_strides_that_differ_between_slots_are_left(launches: Launches) -> None:
    tall, wide = torch.randn(3, 2).t(), torch.randn(2, 3)
    for inputs in ([[wide, tall], [wide, wide]], [[wide, wide], [wide, tall]]):
        launches.noted.clear()
        assert_alike(KERNELS.reduce_add_coalesced(inputs, CPU), STAR.reduce_add_coalesced(inputs, CPU, 2**20))
        assert launches.tensors() == 1


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


@pytest.mark.long
@pytest.mark.devices("cpu")
def test_ten_thousand_tensors_of_16_slots(launches: Launches) -> None:
    random = torch.Generator().manual_seed(0)
    numels = torch.randint(0, 40, (10_000,), generator=random).tolist()
    flats = [torch.randn(sum(numels), generator=random) for _ in range(16)]
    inputs = [[*flat.split(numels)] for flat in flats]
    totals = KERNELS.reduce_add_coalesced(inputs, CPU)
    copied = KERNELS.broadcast_coalesced(inputs[0], [CPU] * 16, own=True)
    expected = flats[0].clone()
    for flat in flats[1:]:
        expected += flat
    assert torch.equal(torch.cat(totals), expected)
    assert all(torch.equal(torch.cat(tensors), flats[0]) for tensors in copied)
    for (_, rows, counts), of_rows in zip(launches.noted, ([totals, *inputs], copied), strict=False):
        assert (len(rows), len(counts)) == (len(of_rows), 10_000)
        for row, tensors in zip(rows, of_rows, strict=True):
            places = {place: count for place, count in zip(row, counts, strict=True) if count}
            unit = 1 if of_rows is copied else 4
            assert places == {tensor.data_ptr(): tensor.nbytes // unit for tensor in tensors if tensor.numel()}
