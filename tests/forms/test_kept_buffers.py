"""`KeptBuffers`: copies that stay where they are, with the values of the source at each call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dataparallel.devices import resolve_slots
from dataparallel.forms.kept_tensors import KeptBuffers


def sources(root: torch.device) -> list[Tensor]:
    return [torch.arange(5.0).to(root), torch.ones(2, 3, dtype=torch.double).to(root), torch.tensor(7).to(root)]


def on_slots(buffers: KeptBuffers, tensors: list[Tensor], slots: list) -> list[list[Tensor]]:
    return buffers.on_slots(tensors, resolve_slots(slots), 1 << 20)


def addresses(by_slot: list[list[Tensor]]) -> list[list[int]]:
    return [[tensor.data_ptr() for tensor in tensors] for tensors in by_slot]


@pytest.mark.slots(1, 3)
def test_they_have_the_values_of_each_call_in_one_place(slots: list, root: torch.device) -> None:
    buffers, tensors = KeptBuffers(), sources(root)
    first = addresses(on_slots(buffers, tensors, slots))
    for tensor in tensors:
        tensor.add_(1)
    second = on_slots(buffers, tensors, slots)
    assert addresses(second) == first
    for on_slot in second:
        torch.testing.assert_close([tensor.cpu() for tensor in on_slot], [tensor.cpu() for tensor in tensors])


def test_the_first_slot_has_the_tensors_of_the_source(slots: list, root: torch.device) -> None:
    tensors = sources(root)
    first, *others = on_slots(KeptBuffers(), tensors, slots)
    assert all(found is tensor for found, tensor in zip(first, tensors, strict=True))
    for on_slot in others:
        assert not {*addresses([on_slot])[0]} & {*addresses([tensors])[0]}


@pytest.mark.slots(3)
def test_fewer_slots_use_the_same_copies(slots: list, root: torch.device) -> None:
    buffers, tensors = KeptBuffers(), sources(root)
    first = addresses(on_slots(buffers, tensors, slots))
    assert addresses(on_slots(buffers, tensors, slots[:2])) == first[:2]
    assert addresses(on_slots(buffers, tensors, slots)) == first


def test_other_tensors_get_other_copies(slots: list, root: torch.device) -> None:
    buffers, tensors = KeptBuffers(), sources(root)
    kept = on_slots(buffers, tensors, slots)
    others = [tensor + 1 for tensor in tensors]
    for found in on_slots(buffers, others, slots):
        torch.testing.assert_close([tensor.cpu() for tensor in found], [tensor.cpu() for tensor in others])
    for on_slot in kept:
        torch.testing.assert_close([tensor.cpu() for tensor in on_slot], [tensor.cpu() for tensor in tensors])


def test_a_graph_that_has_read_a_copy_finds_out_about_a_write(slots: list, root: torch.device) -> None:
    """Like on one device: the source was changed between forward and backward."""
    buffers, tensors = KeptBuffers(), sources(root)
    (copy, *_), *_ = on_slots(buffers, tensors, slots)[1:]
    weight = torch.ones_like(copy, requires_grad=True)
    unchanged = (weight * copy).sum()
    on_slots(buffers, tensors, slots)
    unchanged.backward()
    changed = (weight * copy).sum()
    tensors[0].add_(1)
    on_slots(buffers, tensors, slots)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.backward()


def test_calls_in_inference_mode(slots: list, root: torch.device) -> None:
    buffers, tensors = KeptBuffers(), sources(root)
    with torch.inference_mode():
        made = on_slots(buffers, tensors, slots)
    assert not any(tensor.is_inference() for on_slot in made for tensor in on_slot)
