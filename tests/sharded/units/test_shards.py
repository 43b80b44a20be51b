"""What owners hold: shards are views of flat shards, copies for the slots are made once, and a tree has few streams."""

import weakref
from collections.abc import Mapping

import pytest
import torch

from clocked import check_clocks
from dataparallel.comm.streams import current
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.sharded.units.shards import LastCopies, OwnedShards, PullSource, TreeStreams
from made_units import parameters, values


@pytest.fixture
def owned(slots: list) -> OwnedShards:
    return OwnedShards(parameters(values(rows=7), slots), [torch.device(slot) for slot in slots])


def assert_holds(owned: OwnedShards, expected: list[torch.Tensor]) -> None:
    """Asserts that parameters and flat shards have these values in the same memory."""
    for owner, (flat, device) in enumerate(zip(owned.flats, owned.owners, strict=True)):
        assert flat.device == device
        for parameter, part in zip(owned.parameters, owned.layout.parts_of(flat, owner), strict=True):
            assert parameter.shards[owner].data_ptr() == part.data_ptr()
    for parameter, value in zip(owned.parameters, expected, strict=True):
        assert torch.equal(parameter.full_tensor("cpu"), value)


class TestShards:
    def test_are_views_of_flat_shards_with_the_same_values(self, slots):
        given = parameters(values(rows=7), slots)
        owned = OwnedShards(given, [torch.device(slot) for slot in slots])
        assert_holds(owned, values(rows=7))
        assert not owned.is_stale()
        assert all(kept is parameter for kept, parameter in zip(owned.parameters, given, strict=True))

    def test_that_other_code_has_replaced_are_packed_again(self, owned):
        second = owned.parameters[1]
        second._shards = tuple(shard * 2 for shard in second.shards)
        assert owned.is_stale()
        owned.pack()
        first, second_values = values(rows=7)
        assert_holds(owned, [first, 2 * second_values])
        assert not owned.is_stale()

    def test_are_no_inference_tensors(self, slots):
        made = parameters(values(), slots)
        with torch.inference_mode():
            owned = OwnedShards(made, [torch.device(slot) for slot in slots])
        assert not any(shard.is_inference() for parameter in owned.parameters for shard in parameter.shards)


def source(owned: OwnedShards, dtype: torch.dtype, pulls: int = 2) -> tuple[PullSource, TreeStreams]:
    tree_streams = TreeStreams(owned.owners)
    return PullSource(owned, dtype, tree_streams, LastCopies(), pulls), tree_streams


def pieces_of(made: PullSource) -> tuple[list[torch.Tensor], Mapping[torch.device, Event]]:
    streams = current_streams(made._owned.owners)
    return made.pieces({device: Event(stream) for device, stream in streams.items()})


class TestSources:
    def test_casts_are_dropped_when_the_last_slot_has_pulled(self, owned):
        made, _ = source(owned, torch.float32, pulls=2)
        alive = weakref.ref(pieces_of(made)[0][0])
        made.end_pull([])
        assert alive() is not None
        assert not made.is_used_up
        made.end_pull([])
        assert made.is_used_up
        assert alive() is None

    @pytest.mark.devices("sim", "stand-in")
    def test_casts_follow_the_values_and_readers_the_casts_and_their_memory_the_readers(self, owned):
        with torch.no_grad():
            owned.parameters[0].add_(1)
        made, tree_streams = source(owned, torch.float32, pulls=1)
        pieces, ready = pieces_of(made)
        readers = tree_streams.pulling[1]
        for device, stream in readers.items():
            ready[device].make_wait(stream)
        with streams_set(readers):
            for piece in pieces:
                piece.clone()  # the clocks see that it follows the cast
        made.end_pull([Event(stream) for stream in readers.values()])
        del pieces
        check_clocks()  # and that the memory is free after it

    @pytest.mark.devices("sim", "stand-in")
    def test_memory_waits_for_a_reader_that_another_slot_has_overtaken_by_a_second_pull(self, owned):
        made, tree_streams = source(owned, torch.float32, pulls=2)
        slow, ready = pieces_of(made)
        made.end_pull([])
        made.end_pull([])  # the other slot's, which has freed and gathered again: the copies are dropped
        readers = tree_streams.pulling[1]
        for device, stream in readers.items():
            ready[device].make_wait(stream)
        with streams_set(readers):
            for piece in slow:
                piece.clone()
        made.end_pull([Event(stream) for stream in readers.values()])
        del piece, slow
        check_clocks()


@pytest.mark.devices("sim", "stand-in")
class TestStreams:
    @pytest.fixture(autouse=True)
    def distinct_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch gives out the same 32 streams again and again: older ones may be one stream."""
        monkeypatch.setattr(current, "_kept", {})

    @pytest.mark.slots(8)
    def test_there_are_few_for_any_number_of_slots(self, slots):
        """Trees share them."""
        used: set[torch.Stream] = set()
        for tree_streams in (TreeStreams(slots), TreeStreams(slots), TreeStreams([*slots, *slots])):
            used.update(tree_streams.receiving)
            for streams in (tree_streams.adding, tree_streams.casting, *tree_streams.pulling):
                used.update(streams.values())
        for device in slots:
            assert sum(1 for stream in used if stream.device == device) <= 8
