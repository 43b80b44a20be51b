"""Batches that are not tensors are split into samples and joined again in order: packed sequences, registered types."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from dataparallel import gather, scatter
from dataparallel.batch_types import register_batch
from dataparallel.batches import batch_types


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes back what a test registers: registrations have no public end."""
    monkeypatch.setattr(batch_types, "_batches", dict(batch_types._batches))


class Sentences:
    """A batch of strings, as it might come from a tokenizer."""

    def __init__(self, texts: list[str], device: Any = None) -> None:
        self.texts, self.device = texts, device

    def to(self, device: torch.device) -> "Sentences":
        return Sentences(self.texts, device)


def register_sentences(**kwargs: Any) -> None:
    register_batch(
        Sentences,
        size=lambda batch: len(batch.texts),
        split=lambda batch, sizes: [
            Sentences(batch.texts[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))
        ],
        merge=lambda batches: Sentences([text for batch in batches for text in batch.texts], batches[0].device),
        **kwargs,
    )


@pytest.mark.usefixtures("own_registry")
def test_a_registered_batch_is_cut_moved_and_joined(slots: list, root: torch.device) -> None:
    register_sentences()
    parts = scatter([Sentences(list("abcde")), torch.arange(5).to(root)], slots, chunk_sizes=[1, 3, 1])
    assert [part[0].texts for part in parts] == [["a"], ["b", "c", "d"], ["e"]]
    assert [part[0].device for part in parts] == [torch.device(slot) for slot in slots]
    assert gather(parts, root)[0].texts == list("abcde")
    with pytest.raises(ValueError, match=r"input\[0\] has 2, input\[1\] has 3"):
        scatter([Sentences(["a", "b"]), torch.arange(3)], slots)


@pytest.mark.usefixtures("own_registry")
def test_a_batch_can_say_how_it_moves(slots: list) -> None:
    register_sentences(to=lambda batch, device: Sentences(batch.texts, "moved"))
    assert [part.device for part in scatter(Sentences(list("abc")), slots)] == ["moved"] * 3


LENGTHS = {"sorted": [5, 4, 4, 2, 1, 1, 1], "unsorted": [1, 4, 2, 5, 1, 4, 1]}


def packed(kind: str, device: torch.device) -> tuple[PackedSequence, list[Tensor]]:
    sequences = [
        torch.randn(length, 2, dtype=torch.float64, device=device, requires_grad=True) for length in LENGTHS[kind]
    ]
    return pack_sequence(sequences, enforce_sorted=kind == "sorted"), sequences


@pytest.mark.parametrize("chunk_sizes", [None, [1, 4, 2]])
@pytest.mark.parametrize("kind", LENGTHS)
def test_packed_sequences_keep_samples_in_order(kind: str, chunk_sizes: Any, slots: list, root: torch.device) -> None:
    whole, sequences = packed(kind, root)
    parts = scatter(whole, slots, chunk_sizes=chunk_sizes)
    assert [int(part.batch_sizes[0]) for part in parts] == (chunk_sizes or [3, 3, 1])
    assert all((part.sorted_indices is None) == (kind == "sorted") for part in parts)
    split = [sequence for part in parts for sequence in unpack_sequence(part)]
    joined = gather(parts, root)
    assert type(joined) is PackedSequence
    assert (joined.sorted_indices is None) == (kind == "sorted")
    for found in (split, unpack_sequence(joined)):
        assert [len(sequence) for sequence in found] == LENGTHS[kind]
        assert all(torch.equal(a.to(root), b) for a, b in zip(found, sequences, strict=True))


@pytest.mark.parametrize("kind", LENGTHS)
def test_gradients_reach_every_packed_sample(kind: str, slots: list, root: torch.device) -> None:
    whole, sequences = packed(kind, root)
    parts = scatter(whole, slots)
    scaled = [part._replace(data=part.data * (slot + 1)) for slot, part in enumerate(parts)]
    gather(scaled, root).data.sum().backward()
    for sample, sequence in enumerate(sequences):
        assert torch.equal(sequence.grad, torch.full_like(sequence, sample // 3 + 1))


def test_parts_that_are_sorted_may_be_unsorted_together(root: torch.device) -> None:
    parts = [pack_sequence([torch.ones(length) * length]).to(root) for length in (1, 3, 2)]
    assert [sequence.tolist() for sequence in unpack_sequence(gather(parts, root))] == [[1], [3, 3, 3], [2, 2]]
