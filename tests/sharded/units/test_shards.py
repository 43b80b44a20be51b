"""What owners hold: shards are views of flat shards, copies for the slots are made once, and a tree has few streams."""

import copy
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clocked import check_clocks
from dataparallel.comm.streams import current
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.sharded.units.shards import LastCopies, OwnedShards, PullSource, TreeStreams, wait_for
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

    def test_changes_in_place_are_seen_in_the_flat_shards(self, owned):
        with torch.no_grad():
            owned.parameters[0].add_(1)
        first, second = values(rows=7)
        assert_holds(owned, [first + 1, second])
        assert not owned.is_stale()

    def test_are_no_inference_tensors(self, slots):
        made = parameters(values(), slots)
        with torch.inference_mode():
            owned = OwnedShards(made, [torch.device(slot) for slot in slots])
        assert not any(shard.is_inference() for parameter in owned.parameters for shard in parameter.shards)

    def test_on_meta_have_no_memory_to_pack(self, slots):
        owned = OwnedShards(parameters([copy.copy(v).to("meta") for v in values()], slots), slots)
        assert owned.are_on_meta
        assert owned.flats == []

    def test_the_memory_beside_them_is_zero(self, slots):
        flats = OwnedShards(parameters([torch.ones(4, 1)], slots), slots).flats
        assert [flat.sum().item() for flat in flats] == [2, 2, 0]


def source(owned: OwnedShards, dtype: torch.dtype, pulls: int = 2) -> tuple[PullSource, TreeStreams]:
    tree_streams = TreeStreams(owned.owners)
    unit: Any = SimpleNamespace(
        dtype_on_slots=lambda _: dtype, streams=tree_streams, binding=SimpleNamespace(copies=LastCopies())
    )
    return PullSource(unit, owned, pulls), tree_streams


def pieces_of(made: PullSource) -> tuple[list[torch.Tensor], Mapping[torch.device, Event]]:
    streams = current_streams(made._owned.owners)
    return made.pieces({device: Event(stream) for device, stream in streams.items()})


class TestSources:
    def test_flat_shards_are_pulled_as_they_are(self, owned):
        pieces, ready = pieces_of(source(owned, torch.float64)[0])
        assert all(piece is flat for piece, flat in zip(pieces, owned.flats, strict=True))
        assert not ready

    def test_casts_are_made_once_for_all_slots(self, owned):
        made, _ = source(owned, torch.float32)
        first, ready = pieces_of(made)
        for event in ready.values():
            event.synchronize()
        assert pieces_of(made)[0] is first
        for piece, flat in zip(first, owned.flats, strict=True):
            assert torch.equal(piece, flat.float())

    def test_casts_are_dropped_when_the_last_slot_has_pulled(self, owned):
        made, _ = source(owned, torch.float32, pulls=2)
        alive = weakref.ref(pieces_of(made)[0][0])
        made.end_pull([])
        assert alive() is not None
        assert not made.is_used_up
        made.end_pull([])
        assert made.is_used_up
        assert alive() is None

    def test_host_memory_is_sent_to_the_owners(self, slots):
        given = parameters(values(), ["cpu"] * len(slots))
        owned = OwnedShards(given, [torch.device(slot) for slot in slots])
        assert {flat.device.type for flat in owned.flats} == {"cpu"}
        pieces, ready = pieces_of(source(owned, torch.float64)[0])
        for event in ready.values():
            event.synchronize()
        assert [piece.device for piece in pieces] == owned.owners
        for piece, flat in zip(pieces, owned.flats, strict=True):
            assert torch.equal(piece.cpu(), flat)

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

    def test_what_ends_on_a_device_has_streams_of_its_own(self, slots):
        tree_streams = TreeStreams(slots)
        used = [
            *tree_streams.receiving,
            *tree_streams.adding.values(),
            *tree_streams.casting.values(),
            *current_streams(slots).values(),
        ]
        assert len({(stream.device, stream.stream_id) for stream in used}) == len(used)
        leaving = [
            s
            for slot, streams in zip(slots, tree_streams.pulling, strict=True)
            for d, s in streams.items()
            if d != slot
        ]
        assert not {*leaving} & {*used}

    def test_a_slot_receives_on_its_device_and_shards_leave_on_all_others(self, slots):
        tree_streams = TreeStreams(slots)
        for slot, device in enumerate(slots):
            pulling = tree_streams.pulling[slot]
            assert {*pulling} == {*slots}
            assert pulling[device] == tree_streams.receiving[slot]
            assert all(stream.device == where for where, stream in pulling.items())

    def test_events_meet_in_one(self, slots):
        tree_streams, written = TreeStreams(slots), []
        for device, stream in tree_streams.adding.items():
            with streams_set({device: stream}):
                written.append(torch.ones(2, device=device))
        met = tree_streams.meet("sums", [Event(stream) for stream in tree_streams.adding.values()])
        for tensor, device, stream in zip(written, slots, tree_streams.receiving, strict=True):
            met.make_wait(stream)
            with streams_set({device: stream}):
                tensor.add_(1)  # the clocks see it
        wait_for([Event(stream) for stream in tree_streams.receiving], tree_streams.adding.values())

    def test_slots_on_one_device_share_streams(self, root):
        tree_streams = TreeStreams([root, root])
        assert tree_streams.receiving[0] == tree_streams.receiving[1]
        assert tree_streams.pulling[1] == {root: tree_streams.receiving[1]}

    @pytest.mark.slots(8)
    def test_there_are_few_for_any_number_of_slots(self, slots):
        """Trees share them."""
        used: set[torch.Stream] = set()
        for tree_streams in (TreeStreams(slots), TreeStreams(slots), TreeStreams([*slots, *slots])):
            used.update(tree_streams.receiving, tree_streams.meeting.values())
            for streams in (tree_streams.adding, tree_streams.casting, *tree_streams.pulling):
                used.update(streams.values())
        for device in slots:
            assert sum(1 for stream in used if stream.device == device) <= 8


def test_the_cpu_has_no_streams():
    tree_streams = TreeStreams([torch.device("cpu")] * 2)
    assert tree_streams.receiving == [None, None]
    assert tree_streams.meet("pulls", []) is None
    assert not tree_streams.casting
    assert not tree_streams.pulling[0]
    assert not tree_streams.adding
