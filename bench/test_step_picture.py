"""The picture of the front page: which part of a step a launch is, and which bars follow. Nothing is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import step_picture
from by_hand import launch
from nogpu.timeline import Launch, Recording, StreamName
from recorded import Recorded
from step_picture import BACKWARD, COPY, FORWARD, OPTIMIZER, SUM, bars_of, part_of
from timelines import TORCH, WRAPPER

WEIGHT, ACTIVATION = (768, 768), (8, 512, 768)


def work(op: str, *shapes: tuple[int, ...], index: int = 0, **fields: Any) -> Launch:
    return launch(index, f"aten::{op}", shapes=shapes, bytes_written=450_000_000, host_seconds=0.0, **fields)


@pytest.mark.parametrize(
    ("made", "part"),
    [
        (work("mm", ACTIVATION, WEIGHT), FORWARD),
        (work("mm", ACTIVATION, WEIGHT, in_backward=True), BACKWARD),
        (work("add", ACTIVATION, ACTIVATION, in_backward=True), BACKWARD),
        (work("add_", WEIGHT, WEIGHT, in_backward=True), SUM),
        (work("_copy_from", WEIGHT, copy=(0, 1), in_backward=True), COPY),
        (work("_foreach_add_", WEIGHT), OPTIMIZER),
    ],
)
def test_parts(made: Launch, part: str) -> None:
    assert part_of(made) == part


@pytest.fixture
def two_steps() -> Recorded:
    """Each computes on device 0, and sends what it has computed to device 1."""
    streams = (StreamName(0, 0), StreamName(1, 0))
    launches = [
        made
        for at in (0, 2)
        for made in (
            work("mm", ACTIVATION, index=at),
            work("_copy_from", WEIGHT, index=at + 1, copy=(0, 1), joins=1),
        )
    ]
    return Recorded(Recording(streams, tuple(launches[:2])), Recording(streams, tuple(launches)))


def test_only_the_second_step_is_drawn_and_copies_are_at_both_ends(two_steps: Recorded) -> None:
    length, bars = bars_of(two_steps)
    assert set(bars) == {(0, FORWARD), (0, COPY), (1, COPY)}
    assert bars[0, COPY] == bars[1, COPY]
    ((start, end),) = bars[0, COPY]
    assert 0 < start < end == pytest.approx(length)


def test_it_is_drawn(two_steps: Recorded, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, bars = bars_of(two_steps)
    step_picture.draw({TORCH: (100.0, bars), WRAPPER: (50.0, bars)}, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000
