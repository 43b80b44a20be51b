"""A replica that is late in stepping aside goes on by itself, and nobody ends its next wait."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from dataparallel.threads.gang import Gang
from dataparallel.threads.meetings import Meeting, here
from dataparallel.threads.pool import Turn


def test_the_next_wait_is_not_ended_by_the_last_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    step_aside, seen = Gang.step_aside, []

    def slowly(gang: Gang, slot: int, go_on: Sequence[int] = ()) -> Turn:
        if len(seen) < 2:
            seen.append(slot)
            # Slot 0 is about to wait when slot 1 comes. Then slot 1 needs longer to let it go on than slot 0 to come
            # to the next meeting.
            time.sleep(0.5 if go_on else 0.2)
        return step_aside(gang, slot, go_on)

    def replica() -> list[int]:
        place = here()
        assert place is not None
        time.sleep(0.1 * place.index)
        first = place.meet("first", place.index, lambda values: values[::-1])
        time.sleep(0.3 * place.index)
        return [first, place.meet("second", place.index, lambda values: values[::-1])]

    monkeypatch.setattr(Gang, "step_aside", slowly)
    meeting = Meeting([torch.device("cpu")] * 2)
    gang = Gang([lambda slot=slot: meeting.run_replica(slot, replica) for slot in range(2)], permits=2)
    meeting.turns = gang
    assert [(outcome.value, outcome.error) for outcome in gang.run_tasks()] == [([1, 1], None), ([0, 0], None)]
    assert seen == [0, 1]
