"""What the functions of ``comm`` return, what they refuse and with which words. How tensors travel: test_transport."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dataparallel import comm
from dataparallel.comm import near_equal_sizes

host_only = pytest.mark.devices("cpu")


# Broadcast


def test_broadcast_hands_the_tensor_itself_to_slots_on_its_device(slots: list, root: torch.device) -> None:
    tensor = torch.randn(3, 4, device=root)
    copies = comm.broadcast(tensor, slots)
    assert [copy.device for copy in copies] == [torch.device(slot) for slot in slots]
    for copy in copies:
        assert torch.equal(copy.to(root), tensor)
        assert (copy is tensor) == (copy.device == root)


@pytest.mark.parametrize("way", ["star", "chain"], indirect=True)
@pytest.mark.slots(4)
def test_broadcast_into_out_of_other_dtypes_converts_once(way: str, slots: list, root: torch.device) -> None:
    """What one of them has rounded is not passed on to the next."""
    tensor = torch.randn(5, device=root)
    dtypes = [torch.float16, torch.float32, torch.float64]
    out = [torch.zeros(5, dtype=dtype, device=slot) for dtype, slot in zip(dtypes, slots[1:], strict=True)]
    copies = comm.broadcast(tensor, out=out)
    assert all(copy is target for copy, target in zip(copies, out, strict=True))
    assert all(torch.equal(target.to(root), tensor.to(target.dtype)) for target in out)


# Sums


def test_one_term_is_handed_through(root: torch.device) -> None:
    term = torch.randn(3, device=root)
    assert comm.reduce_add([term]) is term
    assert comm.reduce_add_coalesced([[term]], root)[0] is term


def test_sums_go_to_the_first_device_unless_told(slots: list) -> None:
    terms = [torch.ones(2, device=slot) for slot in slots]
    assert comm.reduce_add(terms).device == terms[0].device
    assert comm.reduce_add_coalesced([[term] for term in terms])[0].device == terms[0].device
    assert comm.reduce_add(terms, "cpu").device.type == "cpu"
    assert comm.reduce_add_coalesced([[term] for term in terms], "cpu")[0].device.type == "cpu"


@pytest.mark.parametrize("way", ["star", "chain"], indirect=True)
@pytest.mark.slots(4)
def test_sums_leave_their_terms_as_they_are(way: str, slots: list) -> None:
    terms = [torch.ones(5, device=slot) for slot in slots]
    totals = [comm.reduce_add(terms), *comm.reduce_add_coalesced([[term] for term in terms])]
    assert all(total.tolist() == [4.0] * 5 for total in totals)
    assert all(term.tolist() == [1.0] * 5 for term in terms)


# Scatter and gather


@given(st.integers(1, 40), st.integers(1, 9))
@host_only
def test_near_equal_sizes_are_those_of_torch_chunk(total: int, slots: int) -> None:
    assert near_equal_sizes(total, slots) == [len(chunk) for chunk in torch.chunk(torch.zeros(total), slots)]


@given(st.data())
def test_scatter_then_gather_is_the_identity(make_slots: Callable[[int], list], data: st.DataObject) -> None:
    slots = make_slots(data.draw(st.integers(1, 5)))
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.complex64, torch.bool, torch.int64, torch.bfloat16]))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    tensor = torch.randint(0, 9, shape).to(dtype).to(slots[0]).permute(data.draw(st.permutations(range(len(shape)))))
    sizes = None
    if data.draw(st.booleans()):
        cuts = data.draw(st.lists(st.integers(0, tensor.shape[dim]), min_size=len(slots) - 1, max_size=len(slots) - 1))
        bounds = [0, *sorted(cuts), tensor.shape[dim]]
        sizes = [end - start for start, end in itertools.pairwise(bounds)]
    chunks = comm.scatter(tensor, slots, sizes, dim)
    if sizes is None:
        sizes = near_equal_sizes(tensor.shape[dim], len(slots))
    assert [chunk.shape[dim] for chunk in chunks] == sizes
    assert [chunk.device for chunk in chunks] == [torch.device(slot) for slot in slots[: len(sizes)]]
    for expected, chunk in zip(torch.split(tensor, sizes, dim), chunks, strict=True):
        assert torch.equal(chunk.to(expected.device), expected)
    whole = comm.gather(chunks, dim, tensor.device)
    assert whole.dtype == tensor.dtype
    assert torch.equal(whole, tensor)


def test_scatter_and_gather_into_out_follow_its_sizes(root: torch.device) -> None:
    tensor = torch.arange(12.0, device=root).view(3, 4)
    out, back = [torch.zeros(3, 3, device=root), torch.zeros(3, 1)], torch.zeros(3, 4)
    assert all(chunk is target for chunk, target in zip(comm.scatter(tensor, dim=-1, out=out), out, strict=True))
    assert comm.gather(out, -1, out=back) is back
    assert torch.equal(back, tensor.cpu())


# Gradients are not recorded


def test_no_gradient_is_recorded(slots: list, root: torch.device) -> None:
    weight = torch.randn(4, 2, device=root, requires_grad=True)
    tensor = weight * 2
    results = [*comm.scatter(tensor, slots), comm.gather([tensor, tensor]), comm.reduce_add([tensor, tensor])]
    results += comm.reduce_add_coalesced([[tensor], [tensor]])
    results += comm.broadcast_coalesced([tensor], slots, own_storage=True)[1]
    assert not any(result.requires_grad for result in results)
    out = torch.zeros(4, 2, device=root)
    comm.broadcast(tensor, out=[out])
    assert out.grad_fn is None


# What is refused


CALLS = [
    lambda tensor, slots: comm.broadcast(tensor, slots),
    lambda tensor, slots: comm.broadcast_coalesced([tensor], slots),
    lambda tensor, slots: comm.reduce_add([tensor, tensor], slots[0]),
    lambda tensor, slots: comm.reduce_add_coalesced([[tensor], [tensor]], slots[0]),
    lambda tensor, slots: comm.scatter(tensor, slots),
    lambda tensor, slots: comm.gather([tensor, tensor], 0, slots[0]),
]
every_call = pytest.mark.parametrize(
    "call",
    CALLS,
    ids=["broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced", "scatter", "gather"],
)


@every_call
def test_meta_tensors_are_refused(call: Callable, slots: list) -> None:
    with pytest.raises(ValueError, match=r"tensor 0 of shape \(4, 2\) is on the meta device"):
        call(torch.empty(4, 2, device="meta"), slots)


@every_call
def test_lazy_parameters_are_refused(call: Callable, slots: list) -> None:
    with pytest.raises(ValueError, match="tensor 0 is an uninitialised lazy parameter"):
        call(nn.UninitializedParameter(), slots)


@every_call
@host_only
def test_devices_that_do_not_exist_are_refused(call: Callable) -> None:
    with pytest.raises(ValueError, match="this machine has"):
        call(torch.zeros(4, 2), ["no such device"] * 2)


@host_only
def test_sums_refuse_mixed_shapes_and_dtypes() -> None:
    same = torch.zeros(2, 3)
    for reduce, where in (
        (comm.reduce_add, ""),
        (lambda terms: comm.reduce_add_coalesced([[torch.zeros(1), term] for term in terms]), " at position 1"),
    ):
        shapes = rf"different shapes{where}: tensor 0 has \(2, 3\), tensor 2 has \(3, 2\)"
        with pytest.raises(ValueError, match=shapes):
            reduce([same, same, torch.zeros(3, 2)])
        dtypes = rf"different dtypes{where}: tensor 0 has torch.float32, tensor 1 has torch.f"
        with pytest.raises(ValueError, match=dtypes):
            reduce([same, same.double()])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: comm.reduce_add([]), "no tensors"),
        (lambda: comm.reduce_add_coalesced([]), "at least one slot; got none"),
        (lambda: comm.reduce_add_coalesced([[torch.zeros(1)], []]), r"same number of tensors; got \[1, 0\]"),
        (lambda: comm.reduce_add_coalesced([[torch.zeros(1)]] * 2, buffer_size=0), "buffer_size=0: expected an int"),
        (lambda: comm.broadcast_coalesced([torch.zeros(1)], ["cpu"], 0), "buffer_size=0: expected an int"),
        (lambda: comm.broadcast(torch.zeros(1), []), "list of devices is empty"),
        (lambda: comm.scatter(torch.zeros(1), []), "list of devices is empty"),
        (lambda: comm.broadcast(torch.zeros(1)), "exactly one of devices and out"),
        (lambda: comm.broadcast(torch.zeros(1), ["cpu"], out=[torch.zeros(1)]), "exactly one of devices and out"),
        (lambda: comm.scatter(torch.zeros(1)), "exactly one of devices and out"),
        (lambda: comm.scatter(torch.zeros(1), ["cpu"], out=[torch.zeros(1)]), "exactly one of devices and out"),
        (lambda: comm.scatter(torch.zeros(4), ["cpu", "cpu"], [4]), r"\[4\] has 1 entries for 2 slots"),
        (lambda: comm.scatter(torch.zeros(4), ["cpu", "cpu"], [1, 2]), r"\[1, 2\] add up to 3, .* 4 samples"),
        (lambda: comm.scatter(torch.zeros(4), ["cpu", "cpu"], [5, -1]), r"\[5, -1\]: sizes cannot be negative"),
        (lambda: comm.scatter(torch.zeros(4), out=[torch.zeros(4)], chunk_sizes=[4]), "only one of them"),
        (lambda: comm.gather([]), "at least one tensor; got none"),
        (lambda: comm.gather([torch.zeros(2), torch.zeros(2).double()]), "0 has dtype torch.float32, tensor 1 has tor"),
        (lambda: comm.gather([torch.zeros(2, 2), torch.zeros(2, 3)]), r"0 has shape \(2, 2\), tensor 1 has \(2, 3\)"),
        (lambda: comm.gather([torch.zeros(2), torch.zeros(2, 1)]), "only along dimension 0"),
        (lambda: comm.gather([torch.zeros(2)], 0, "cpu", out=torch.zeros(2)), "only one of destination and out"),
    ],
)
@host_only
def test_the_message_names_what_is_wrong(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dim", [2, -3])
@host_only
def test_a_missing_dimension_is_an_index_error(dim: int) -> None:
    with pytest.raises(IndexError, match=rf"scatter a tensor of shape \(2, 2\) along dimension {dim}"):
        comm.scatter(torch.zeros(2, 2), ["cpu"], None, dim)
    with pytest.raises(IndexError, match=rf"gather tensors of shape \(2, 2\) along dimension {dim}"):
        comm.gather([torch.zeros(2, 2)], dim)
    with pytest.raises(IndexError, match=r"shape \(\)"):
        comm.scatter(torch.tensor(1.0), ["cpu"])


@pytest.mark.parametrize(
    ("call", "shapes", "message"),
    [
        (comm.broadcast, [(4, 2), (4, 3)], r"out\[1\] has shape \(4, 3\), expected \(4, 2\)"),
        (comm.scatter, [(2, 2), (2, 3)], r"out\[1\] has shape \(2, 3\), expected \(2, 2\)"),
        (comm.scatter, [(2, 2), ()], r"out\[1\] has shape \(\)"),
        (comm.scatter, [(2, 2), (1, 2)], "add up to 3, the tensor has 4"),
        (lambda tensor, out: comm.gather([tensor, tensor], out=out[0]), [(4, 2)], r"out has shape \(4, 2\) .*\(8, 2"),
    ],
    ids=["broadcast", "scatter", "scatter to a number", "scatter sizes", "gather"],
)
@host_only
def test_a_wrong_out_is_left_untouched(call: Callable, shapes: list, message: str) -> None:
    out = [torch.full(shape, 7.0) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4, 2), out=out)
    assert all(torch.equal(target, torch.full_like(target, 7.0)) for target in out)
