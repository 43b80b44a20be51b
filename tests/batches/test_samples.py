"""Lists with one entry for each sample: scatter cuts them and moves what is inside, gather joins them in order."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree

from dataparallel import PerReplica, gather, samples, scatter, scatter_kwargs
from dataparallel.samples import Samples


def assert_same(found: Any, wanted: Any) -> None:
    leaves, spec = pytree.tree_flatten(found)
    wanted_leaves, wanted_spec = pytree.tree_flatten(wanted)
    assert spec == wanted_spec
    for one, other in zip(leaves, wanted_leaves, strict=True):
        if isinstance(other, Tensor):
            assert torch.equal(one.cpu(), other.cpu())
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
        else:
            assert one == other


def devices_in(tree: Any) -> set[torch.device]:
    return {leaf.device for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}


@given(st.lists(st.integers(0, 4), max_size=9), st.integers(1, 5), st.booleans(), st.data())
def test_each_slot_gets_its_samples_and_they_come_back(
    make_slots: Any, lengths: list[int], count: int, on_host: bool, data: st.DataObject
) -> None:
    """As the targets of a detector, which have as many boxes as there are."""
    slots, x = make_slots(count), torch.arange(len(lengths))
    root, device = torch.device(slots[0]), "cpu" if on_host else slots[0]
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool])
    entries = [
        {
            "boxes": torch.full((length, 4), i, device=device).to(data.draw(dtypes)),
            "id": torch.tensor(i, device=device),
            "name": f"image {i}",
            "size": (i, 2 * i),
        }
        for i, length in enumerate(lengths)
    ]
    shares = data.draw(st.lists(st.floats(0.1, 9), min_size=count, max_size=count))
    sizes = data.draw(st.sampled_from([None, shares]))
    parts, _ = scatter_kwargs((x.to(root), samples(entries)), {}, slots, chunk_sizes=sizes)
    for slot, (numbers, part) in zip(slots, parts, strict=False):
        assert isinstance(part, list)
        assert_same(list(part), [entries[i] for i in numbers])
        assert devices_in(part) <= {torch.device(slot)}
    joined = gather([part for _, part in parts], root)
    assert type(joined) is Samples
    assert_same(list(joined), entries)
    assert devices_in(joined) <= {root}


def test_gradients_reach_every_sample(slots: list, root: torch.device) -> None:
    entries = [torch.full((i + 1,), 1.0, dtype=torch.float64, device=root, requires_grad=True) for i in range(6)]
    parts = scatter(samples([{"x": entry} for entry in entries]), slots)
    outputs = [samples([sample["x"] * (slot + 1) ** 2 for sample in part]) for slot, part in enumerate(parts)]
    joined = gather(outputs, root)
    loss = sum((entry**2).sum() for entry in joined)
    grads = torch.autograd.grad(loss, entries, create_graph=True)
    for i, grad in enumerate(grads):
        assert torch.equal(grad, torch.full_like(grad, 2 * (i // 2 + 1) ** 4))
    sum(grad.sum() for grad in grads).backward()
    assert [entry.grad[0].item() for entry in entries] == [2 * (i // 2 + 1) ** 4 for i in range(6)]


def test_one_tensor_in_several_samples_is_one_tensor_in_each_replica(slots: list, root: torch.device) -> None:
    shared = torch.ones(2, dtype=torch.float64, device=root, requires_grad=True)
    images, targets = samples([shared] * 6), samples([{"image": shared, "i": i} for i in range(6)])
    parts = scatter((images, targets), slots)
    for part_images, part_targets in parts:
        assert len({id(image) for image in (*part_images, *(target["image"] for target in part_targets))}) == 1
    assert len({id(part[0][0]) for part in parts}) == 3
    sum((part[0][0] * 10**slot).sum().to(root) for slot, part in enumerate(parts)).backward()
    assert shared.grad.tolist() == [111, 111]


def test_a_replica_may_change_its_samples_in_place(slots: list, root: torch.device) -> None:
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    entries = [weight * 1 for _ in range(6)]
    for part in scatter(samples(entries), slots):
        kept = part[0] ** 2  # saved for backward
        part[1].mul_(3)
        (kept.sum() + part[1].sum()).backward(retain_graph=True)
    assert weight.grad.tolist() == [15, 15]


def test_batches_inside_a_sample_are_moved_whole(slots: list) -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    for part, slot in zip(scatter(samples([packed] * 3), slots), slots, strict=True):
        assert type(part[0]) is PackedSequence
        assert part[0].data.device == torch.device(slot)


def test_samples_stay_marked_for_another_scatter(slots: list) -> None:
    (part, *_) = scatter(samples(list("abcdef")), slots)
    assert scatter(part, slots) == [["a"], ["b"]]
    assert type(part[:1]) is list


def test_a_single_slot_gets_all_of_them(slots: list, root: torch.device) -> None:
    entries = [torch.ones(1), torch.ones(2, device=root)]
    (part,) = scatter(samples(entries), slots[:1])
    assert type(part) is Samples
    assert devices_in(part) == {root}
    assert part[1] is entries[1], "what is there already stays"


def test_numbers_of_samples_have_to_agree(slots: list) -> None:
    with pytest.raises(ValueError, match=r"args\[0\] has 4, args\[1\]\[\"t\"\] has 3; .*dataparallel\.samples"):
        scatter_kwargs((torch.ones(4), {"t": samples([1, 2, 3])}), {}, slots)
    with pytest.raises(ValueError, match=r"args\[0\] has 2, args\[1\] has 3"):
        scatter_kwargs((samples([1, 2]), samples([1, 2, 3])), {}, slots)


def test_a_list_without_the_mark_is_told_of_it(slots: list) -> None:
    images = [torch.ones(3, 5, 5), torch.ones(3, 6, 6)]
    with pytest.raises(ValueError, match=r"args\[1\]\[0\]\[\"boxes\"\].*dataparallel\.samples\(list\)"):
        scatter_kwargs((images, [{"boxes": torch.ones(2, 4)}, {"boxes": torch.ones(1, 4)}]), {}, slots)
    with pytest.raises(ValueError, match=r"input\[0\] of shape \(3,\) has no dimension 1.*dataparallel\.samples"):
        scatter([torch.ones(3)], slots, dim=1)


def test_lists_of_different_lengths_are_told_of_it(slots: list, root: torch.device) -> None:
    with pytest.raises(ValueError, match=r"replica 0 returned 2 elements.*return dataparallel\.samples\(list\)"):
        gather([[torch.ones(1)] * 2, [torch.ones(1)]], root)
    with pytest.raises(ValueError, match="replica 0 returned Samples, replica 1 returned list"):
        gather([samples([1]), [1]], root)


@pytest.mark.parametrize("entry", [PerReplica([1]), torch.ones(2, device="meta")], ids=["PerReplica", "meta"])
def test_what_no_sample_can_hold_is_named(entry: Any, slots: list, root: torch.device) -> None:
    with pytest.raises(ValueError, match=r"input\[\"t\"\]\[1\]\[\"x\"\]"):
        scatter({"t": samples([1, {"x": entry}])}, slots)
    with pytest.raises(ValueError, match=r"output\[1\]\[\"x\"\]"):
        gather([samples([1, {"x": entry}])], root)


@pytest.mark.parametrize("what", [torch.ones(2), {"a": 1}, "ab", None])
def test_only_lists_and_tuples_are_marked(what: Any) -> None:
    with pytest.raises(TypeError, match=r"entries=.*: expected a list or a tuple with one entry for each sample"):
        samples(what)


def test_functions_are_mapped_over_what_is_inside() -> None:
    found = pytree.tree_map_only(Tensor, lambda tensor: tensor + 1, samples([{"x": torch.ones(1)}]))
    assert type(found) is Samples
    assert found[0]["x"].item() == 2
