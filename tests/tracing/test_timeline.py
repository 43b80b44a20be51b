"""The rows of a timeline, and the two ways to show them: as a picture and as a file for Perfetto."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dataparallel.tracing.perfetto import microseconds, span
from dataparallel.tracing.recorder import Copy, Gradients
from dataparallel.tracing.timeline import NO_PERMIT, OF_SLOT, draw, rows_of, save

pytestmark = pytest.mark.devices("cpu")  # no device takes part

Make = Callable[[], Any]
MS = 1_000_000


@pytest.fixture
def step(by_hand: Make) -> Any:
    """A step of two slots in threads of their own, while a third thread calls too."""
    made = (
        by_hand().span("scatter", 1, 2).span("parallel_apply", 2, 12, detail="")
        .wait(0, 2, 3).wait(1, 2, 4)
        .span("replica", 3, 10, thread=1, slot=0, call=0, detail="Net")
        .span("unshard", 4, 5, thread=1, slot=0)
        .span("replica", 4, 12, thread=2, slot=1, call=0, detail="Net")
        .span("gather", 12, 13).span("backward", 14, 30)
        .span("reduce_add", 25, 28, thread=3).span("optimizer", 30, 33, detail="SGD", call=0)
        .span("scatter", 5, 6, thread=4)
    )  # fmt: skip
    made.marks += [
        Gradients(0, made.thread(3), 20 * MS),
        Gradients(0, made.thread(3), 25 * MS),
        Gradients(1, made.thread(5), 22 * MS),
    ]
    made.copies.append(Copy("reduce_add", "chain", 44, torch.device("meta", 0), torch.device("meta", 1), 26 * MS))
    return made


def test_the_caller_each_slot_sums_and_other_callers(step: Any) -> None:
    rows = rows_of(step, 1 * MS)
    assert [row.title for row in rows] == ["caller (MainThread)", "slot 0 (cpu)", "slot 1 (cpu)", "sums", "thread 4"]
    caller, first, second, sums, other = ([(bar.name, bar.start, bar.end) for bar in row.bars] for row in rows)
    assert [name for name, _, _ in caller] == ["scatter", "forward", "gather", "backward", "optimizer (SGD)"]
    assert caller[0][1:] == (0.0, pytest.approx(0.001))  # from the beginning of the block
    assert [name for name, _, _ in first] == ["forward of Net", "unshard", NO_PERMIT, OF_SLOT]
    assert first[-1][1:] == (pytest.approx(0.013), pytest.approx(0.024))
    assert second[-1][1:] == (pytest.approx(0.013), pytest.approx(0.021))
    assert [name for name, _, _ in sums] == ["sums"]
    assert [name for name, _, _ in other] == ["scatter"]


def test_the_backward_of_a_replica_begins_where_gradients_are_sent_to_slots(step: Any) -> None:
    """Before that the loss has its own."""
    one, other = torch.device("meta", 0), torch.device("meta", 1)
    step.copies += [Copy("backward", "direct", 4, one, other, at * MS) for at in (9, 16, 17, 40)]
    _, first, second, _, _ = rows_of(step, 0)
    for row, end in ((first, 0.025), (second, 0.022)):
        assert (row.bars[-1].start, row.bars[-1].end) == (pytest.approx(0.016), pytest.approx(end))


def test_a_backward_in_one_thread_is_no_slots(step: Any) -> None:
    step.marks[:] = [mark._replace(thread=step.caller) for mark in step.marks]
    assert all(bar.name != OF_SLOT for row in rows_of(step, 0) for bar in row.bars)


def test_units_say_by_their_ranges_when_a_slot_has_delivered(step: Any) -> None:
    step.marks.clear()
    step.span("reduce_add", 18, 19, thread=3, slot=0).span("reduce_add", 20, 21, thread=5, slot=1)
    _, first, second, sums, _ = rows_of(step, 0)
    assert first.bars[-1].end == pytest.approx(0.019)
    assert second.bars[-1].end == pytest.approx(0.021)
    assert len(sums.bars) == 3


def test_the_file_for_perfetto_has_the_rows_and_the_copies(step: Any, tmp_path: Path) -> None:
    save(step, 1 * MS, tmp_path / "step.json")
    written = json.loads((tmp_path / "step.json").read_text())
    events = written["traceEvents"]
    titles = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert titles == {"dataparallel", "copies, launched", "meta:0 to meta:1", *(r.title for r in rows_of(step, 0))}
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(len(row.bars) for row in rows_of(step, 0))
    (optimizer,) = (event for event in slices if event["name"] == "optimizer (SGD)")
    assert (optimizer["ts"], optimizer["dur"]) == (29000.0, 3000.0)
    (copy,) = (event for event in events if event["ph"] == "i")
    assert copy["args"] == {"bytes": 44, "stage": "sums"}
    assert copy["ts"] == 25000.0


def test_slices_that_touch_still_touch_when_they_are_rounded() -> None:
    one, other = span(1e-9 / 3, 5e-9 / 3), span(5e-9 / 3, 1e-6)
    assert one["ts"] + one["dur"] == other["ts"] == microseconds(5e-9 / 3)


def test_the_picture_has_a_row_for_each(step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    saved = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: (figures.append(self), saved(self, *args, **more))
    )
    draw(step, 0, 0.04, tmp_path / "step.png", "a title")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    (axes,) = figure.axes
    rows = rows_of(step, 0)
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.title for row in rows]
    assert len(axes.collections) == sum(len(row.bars) for row in rows)
    assert axes.get_title() == "a title"
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    assert shown == {bar.stage for row in rows for bar in row.bars}


def test_an_empty_block_can_be_shown(by_hand: Make, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(by_hand(), 0, 0.0, tmp_path / "step.png", "nothing")
    save(by_hand(), 0, tmp_path / "step.json")
    assert len(json.loads((tmp_path / "step.json").read_text())["traceEvents"]) == 3


def test_without_matplotlib_the_picture_says_so(by_hand: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        draw(by_hand(), 0, 1.0, tmp_path / "step.png", "nothing")
    assert not (tmp_path / "step.png").exists()
