"""Flattening and unflattening keep values, shapes, strides and dtypes; other tensors travel singly."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensor_kinds import tagged, with_attribute
from torch import Tensor, nn

from dataparallel.comm.buckets import (
    DEFAULT_CAP_BYTES,
    fill_buckets,
    flatten,
    plan_buckets,
    unflatten,
)

pytestmark = pytest.mark.devices("cpu")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
]

# Memory of one run, maybe repeated by stride 0: strides come back as they are.
KEEPS_STRIDES = ["contiguous", "permuted", "channels_last", "offset", "expanded", "expanded permuted", "scalar"]
# Memory with holes: strides come back as Tensor.clone makes them.
HAS_HOLES = ["strided slice", "inner slice", "expanded slice", "diagonal", "overlapping"]


@st.composite
def tensors(draw: st.DrawFn, kinds: list[str], dtypes: list[torch.dtype] = DTYPES) -> Tensor:
    kind, dtype = draw(st.sampled_from(kinds)), draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))

    def filled(*sizes: int) -> Tensor:
        return torch.randint(0, 100, sizes).to(dtype)

    permutation = draw(st.permutations(range(len(shape))))
    repeated = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    once = [1 if again else size for size, again in zip(shape, repeated, strict=True)]
    if kind == "permuted":
        return filled(*shape).permute(permutation)
    if kind == "channels_last":
        return filled(2, *[*shape, 3, 3, 3][:3]).to(memory_format=torch.channels_last)
    if kind == "offset":
        return filled(3, *shape)[1]
    if kind == "expanded":
        return filled(*once).expand(shape)
    if kind == "expanded permuted":
        return filled(*once).expand(shape).permute(permutation)
    if kind == "scalar":
        return filled(5)[draw(st.integers(0, 4))]
    if kind == "strided slice":
        return filled(2 * shape[0], *shape[1:]).permute(permutation)[::2]
    if kind == "inner slice":
        return filled(*shape, 5)[..., 1:4]
    if kind == "expanded slice":
        return filled(*once, 2)[..., 0].expand(shape)
    if kind == "diagonal":
        return filled(4, 4, *shape).diagonal()
    if kind == "overlapping":
        return filled(8).unfold(0, 3, 2)
    return filled(*shape)


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """Sizes with their strides: those of dimensions of size 1, and of tensors without elements, mean nothing."""
    if tensor.numel() == 0:
        return []
    return [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _has_no_holes(tensor: Tensor) -> bool:
    """Whether the memory, taken once where it is repeated, is one run."""
    expected = 1
    for step, size in sorted((step, size) for size, step in _strides(tensor) if step != 0):
        if step != expected:
            return False
        expected *= size
    return True


def _assert_same(restored: Tensor, original: Tensor) -> None:
    assert restored.dtype == original.dtype
    assert restored.shape == original.shape
    assert torch.equal(restored, original)


def _through_flat_buffers(originals: list[Tensor], cap_bytes: int = DEFAULT_CAP_BYTES) -> list[Tensor]:
    """What comes back by buffers that are parts of larger ones. The originals and the rest of a buffer stay."""
    buckets, singles = plan_buckets(originals, cap_bytes)
    assert singles == []
    restored: dict[int, Tensor] = {}
    for bucket in buckets:
        flat = flatten(bucket, originals)
        buffer = flat.new_zeros(flat.numel() + 2)
        buffer[1:-1] = flat
        before = [original.clone() for original in originals]
        flat.zero_()
        assert all(map(torch.equal, originals, before))
        restored.update(zip(bucket.indices, unflatten(bucket, buffer[1:-1]), strict=True))
    assert sorted(restored) == list(range(len(originals)))
    return [restored[index] for index in range(len(originals))]


# Values and strides


@given(st.lists(tensors(KEEPS_STRIDES + HAS_HOLES), min_size=1, max_size=6))
def test_tensors_come_back_with_their_strides_or_where_they_have_holes_as_clone_makes_them(
    originals: list[Tensor],
) -> None:
    for original, restored in zip(originals, _through_flat_buffers(originals), strict=True):
        _assert_same(restored, original)
        like = original if _has_no_holes(original) else original.clone()
        assert _strides(restored) == _strides(like)


def test_an_expanded_tensor_is_stored_once() -> None:
    original = torch.ones(3, 1).expand(3, 1000)
    assert flatten(plan_buckets([original])[0][0], [original]).numel() == 3


@given(st.data())
def test_a_bucket_takes_tensors_with_other_strides_than_it_was_planned_for(data: st.DataObject) -> None:
    """Gradients of one parameter may lie differently in memory on two slots: values, not memory, are in order."""
    dense, offset, expanded = torch.randn(3, 4), torch.randn(2, 3, 4)[1], torch.randn(1, 4).expand(3, 4)
    forms = [dense, torch.randn(4, 3).t(), offset, expanded, torch.randn(()).expand(3, 4), torch.randn(3, 8)[:, ::2]]
    planned, other = data.draw(st.sampled_from(forms)), data.draw(st.sampled_from(forms))
    bucket = plan_buckets([planned], keep_repeats=False)[0][0]
    _assert_same(unflatten(bucket, flatten(bucket, [other]))[0], other)


def test_a_change_of_one_part_leaves_what_autograd_saved_of_another_valid() -> None:
    originals = [torch.randn(3), torch.randn(3)]
    bucket = plan_buckets(originals)[0][0]
    saved, changed = unflatten(bucket, flatten(bucket, originals))
    weight = torch.randn(3, requires_grad=True)
    loss = (saved * weight).sum()
    changed.zero_()
    loss.backward()
    assert torch.equal(weight.grad, originals[0])


# Plans


@given(st.lists(tensors(KEEPS_STRIDES + HAS_HOLES, DTYPES[:3]), max_size=12), st.integers(1, 400))
def test_caps_are_respected_and_everything_travels_once(originals: list[Tensor], cap_bytes: int) -> None:
    buckets, singles = plan_buckets(originals, cap_bytes)
    assert sorted(index for bucket in buckets for index in bucket.indices) == list(range(len(originals)))
    assert singles == []
    ends: dict[tuple[torch.dtype, torch.device], int] = {}
    for bucket in buckets:
        kind = originals[bucket.indices[0]].dtype, originals[bucket.indices[0]].device
        assert min(bucket.indices) > ends.get(kind, -1)  # in a bucket any order, buckets one after the other
        ends[kind] = max(bucket.indices)
        assert len({(originals[index].dtype, originals[index].device) for index in bucket.indices}) == 1
        flat = flatten(bucket, originals)
        assert flat.numel() * flat.element_size() <= cap_bytes or len(bucket.indices) == 1
    for original, restored in zip(originals, _through_flat_buffers(originals, cap_bytes), strict=True):
        _assert_same(restored, original)


def test_a_bucket_is_filled_before_the_next_is_opened() -> None:
    originals = [torch.zeros(size, dtype=dtype) for size in (4, 4, 1) for dtype in (torch.float32, torch.float64)]
    buckets, _ = plan_buckets(originals, cap_bytes=32)
    assert [bucket.indices for bucket in buckets] == [[0, 2], [1], [3], [4], [5]]


def test_groups_are_of_one_dtype_and_the_first_may_have_a_smaller_cap() -> None:
    originals = [torch.zeros(4, dtype=dtype) for _ in range(4) for dtype in (torch.float32, torch.float64)]
    assert fill_buckets(originals, range(8), 16, 64) == [[0], [1], [2, 4, 6], [3, 5], [7]]
    assert fill_buckets(originals, range(7, -1, -1), 2**20, 64) == [[7, 5], [6, 4, 2, 0], [3], [1]]


def test_caps_double_until_they_are_what_was_asked_for() -> None:
    originals = [torch.zeros(1)] * 30
    sizes = [len(group) for group in fill_buckets(originals, range(30), 4, 32)]
    assert sizes == [1, 2, 4, 8, 7, 4, 2, 2]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 64), st.integers(1, 128))
def test_groups_are_small_at_both_ends(numbers: list[int], first_bytes: int, cap_bytes: int) -> None:
    """Nothing is left to compute beside the sum of the last group, and a forward waits for its parameters."""
    originals = [torch.zeros(number, dtype=torch.uint8) for number in numbers]
    groups = fill_buckets(originals, range(len(numbers)), first_bytes, cap_bytes)
    assert [index for group in groups for index in group] == [*range(len(numbers))]
    left = sum(numbers)
    for position, group in enumerate(groups):
        held = sum(numbers[index] for index in group)
        allowed = min(first_bytes * 2**position, cap_bytes, max(cap_bytes // 4, left // 2))
        assert held <= allowed or len(group) == 1
        left -= held


def test_tensors_of_one_layout_are_neighbours_and_large_powers_of_two_come_first() -> None:
    originals = [torch.zeros(*shape) for shape in [(3,), (4, 4), (3,), (2,), (4, 4), (3,)]]
    (bucket,), _ = plan_buckets(originals)
    assert bucket.indices == [1, 4, 3, 0, 2, 5]
    assert [(layout.shape, count) for layout, count in bucket.runs] == [((4, 4), 2), ((2,), 1), ((3,), 3)]


# What travels flat


MORE_THAN_MEMORY: dict[str, Callable[[], Tensor]] = {
    "subclass": lambda: tagged(torch.zeros(2)),
    "buffer": lambda: nn.Buffer(torch.zeros(2)),
    "attribute": lambda: with_attribute(torch.zeros(2)),
    "conj": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "neg": lambda: torch._neg_view(torch.ones(2)),
    "imag of conj": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed sparse": lambda: torch.eye(2).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", MORE_THAN_MEMORY)
def test_what_is_more_than_its_memory_travels_singly(kind: str) -> None:
    assert plan_buckets([MORE_THAN_MEMORY[kind]()]) == ([], [0])
