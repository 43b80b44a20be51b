"""The streams of a tree: each slot and each owner has its own, all trees share them, and the CPU has none."""

import pytest
import torch

from dataparallel.streams import current
from dataparallel.streams.current import Event, current_streams, streams_set
from dataparallel.units.lines import Lines, wait_for


@pytest.mark.devices("sim", "stand-in")
class TestOnAccelerators:
    @pytest.fixture(autouse=True)
    def distinct_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch gives out the same 32 streams again and again: older ones may be one stream."""
        monkeypatch.setattr(current, "_kept", {})

    def test_what_ends_on_a_device_has_streams_of_its_own(self, slots):
        lines = Lines(slots)
        used = [*lines.receiving, *lines.adding.values(), *lines.casting.values(), *current_streams(slots).values()]
        assert len({(stream.device, stream.stream_id) for stream in used}) == len(used)
        leaving = [s for slot in range(len(slots)) for d, s in lines.pulling(slot).items() if d != slots[slot]]
        assert not {*leaving} & {*used}

    def test_a_slot_receives_on_its_device_and_shards_leave_on_all_others(self, slots):
        lines = Lines(slots)
        for slot, device in enumerate(slots):
            pulling = lines.pulling(slot)
            assert {*pulling} == {*slots}
            assert pulling[device] == lines.receiving[slot]
            assert all(stream.device == where for where, stream in pulling.items())

    def test_events_meet_in_one(self, slots):
        lines, written = Lines(slots), []
        for device, stream in lines.adding.items():
            with streams_set({device: stream}):
                written.append(torch.ones(2, device=device))
        met = lines.meet("sums", [Event(stream) for stream in lines.adding.values()])
        for tensor, device, stream in zip(written, slots, lines.receiving, strict=True):
            met.make_wait(stream)
            with streams_set({device: stream}):
                tensor.add_(1)  # the clocks see it
        wait_for([Event(stream) for stream in lines.receiving], lines.adding.values())

    def test_slots_on_one_device_share_streams(self, root):
        lines = Lines([root, root])
        assert lines.receiving[0] == lines.receiving[1]
        assert lines.pulling(1) == {root: lines.receiving[1]}

    @pytest.mark.slots(8)
    def test_there_are_few_for_any_number_of_slots(self, slots):
        for lines in (Lines(slots), Lines([*slots, *slots])):
            used = {*lines.receiving, *lines.adding.values(), *lines.meeting.values(), *lines.casting.values()}
            for slot in range(len(lines.slots)):
                used.update(lines.pulling(slot).values())
            for device in slots:
                assert sum(1 for stream in used if stream.device == device) <= 8

    def test_are_kept_for_all_trees(self, slots):
        assert Lines(slots).receiving == Lines(slots).receiving
        assert Lines(slots).pulling(1) == Lines(slots).pulling(1)

    def test_each_stream_waits_for_each_event(self, slots):
        lines, written = Lines(slots), []
        for device, stream in zip(slots, lines.receiving, strict=True):
            with streams_set({device: stream}):
                written.append(torch.ones(2, device=device))
        wait_for([Event(stream) for stream in lines.receiving], lines.adding.values())
        for tensor, device, stream in zip(written, slots, [lines.adding[slot] for slot in slots], strict=True):
            with streams_set({device: stream}):
                tensor.add_(1)  # the clocks see it
        wait_for([Event(stream) for stream in lines.adding.values()], lines.receiving)


def test_the_cpu_has_no_streams():
    lines = Lines([torch.device("cpu")] * 2)
    assert lines.receiving == [None, None]
    assert lines.meet("pulls", []) is None
    assert not lines.casting
    assert not lines.pulling(0)
    assert not lines.adding
