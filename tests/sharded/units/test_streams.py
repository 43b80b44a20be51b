"""The streams of a tree: each slot and each owner has its own, all trees share them, and the CPU has none."""

import pytest
import torch

from dataparallel.comm.streams import current
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.sharded.units.shards import TreeStreams, wait_for


@pytest.mark.devices("sim", "stand-in")
class TestOnAccelerators:
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
        leaving = [s for slot in range(len(slots)) for d, s in tree_streams.pulling[slot].items() if d != slots[slot]]
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
        for tree_streams in (TreeStreams(slots), TreeStreams([*slots, *slots])):
            used = {
                *tree_streams.receiving,
                *tree_streams.adding.values(),
                *tree_streams.meeting.values(),
                *tree_streams.casting.values(),
            }
            for slot in range(len(tree_streams.slots)):
                used.update(tree_streams.pulling[slot].values())
            for device in slots:
                assert sum(1 for stream in used if stream.device == device) <= 8

    def test_are_kept_for_all_trees(self, slots):
        assert TreeStreams(slots).receiving == TreeStreams(slots).receiving
        assert TreeStreams(slots).pulling[1] == TreeStreams(slots).pulling[1]

    def test_each_stream_waits_for_each_event(self, slots):
        tree_streams, written = TreeStreams(slots), []
        for device, stream in zip(slots, tree_streams.receiving, strict=True):
            with streams_set({device: stream}):
                written.append(torch.ones(2, device=device))
        wait_for([Event(stream) for stream in tree_streams.receiving], tree_streams.adding.values())
        for tensor, device, stream in zip(written, slots, [tree_streams.adding[slot] for slot in slots], strict=True):
            with streams_set({device: stream}):
                tensor.add_(1)  # the clocks see it
        wait_for([Event(stream) for stream in tree_streams.adding.values()], tree_streams.receiving)


def test_the_cpu_has_no_streams():
    tree_streams = TreeStreams([torch.device("cpu")] * 2)
    assert tree_streams.receiving == [None, None]
    assert tree_streams.meet("pulls", []) is None
    assert not tree_streams.casting
    assert not tree_streams.pulling[0]
    assert not tree_streams.adding
