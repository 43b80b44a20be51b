"""A schedule as a table, as a picture, and as a trace."""

import json
import sys

import pytest

from hand_made import Program, machine
from nogpu.timeline import Host, Schedule, schedule

pytestmark = pytest.mark.devices("cpu")  # no device takes part: once is enough


@pytest.fixture
def result() -> Schedule:
    """A step on two devices: a thread each, a copy there and back, and a host that waits for the result."""
    program = Program()
    program.kernel((0, 0), 2, op="aten::addmm")
    sent = program.copy((0, 0), 1, 3, current=(1, 0))
    program.kernel((1, 0), 4, op="aten::relu", thread=1, in_backward=True, issued_after=(sent,), stack="step.py:7")
    back = program.copy((1, 5), 0, 1, after=[2], current=(0, 0), shapes=((3, 4),))
    program.kernel((0, 0), 1, op="aten::add_", host_waits=(back,))
    return schedule(program.recording(), machine(2, host=Host(1e-3, 0, 0)))


class TestSummary:
    @pytest.mark.smoke
    def test_it_says_what_the_step_is(self, result):
        lines = result.summary().splitlines()
        assert lines[0] == "A prediction for hand-made. Times are in ms."
        assert lines[2].split()[:3] == ["step", "11002.000", "5"]
        assert "2 of them copies" in lines[2]
        assert lines[3].split()[:5] == ["any", "link", "is", "busy", "4000.000"]
        assert lines[4].split()[:3] == ["exposed", "communication", "4000.000"]

    def test_it_counts_the_calls_of_the_host_where_there_are_graphs(self):
        program = Program()
        for _ in range(3):
            program.kernel((0, 0), graph=0)
        (line,) = [
            line for line in schedule(program.recording(), machine(1)).summary().splitlines() if line.startswith("step")
        ]
        assert line.endswith("3 launches, 0 of them copies between two places, by 1 calls of the host")

    @pytest.mark.parametrize(
        "row",
        [
            "0 3 3000.000 4000.000 27.3",  # device 0
            "1 2 4000.000 4000.000 36.4",  # device 1
            "device 1 stream 5 1 0.000 1000.000",
            "0 out 3000.000 27.3",
            "0 4 4.000 9998.000 0.000 1000.000",
            "5000.000 1 relu on device 1 _copy_from on device 0",
            "4000.000 36.4 1 relu on device 1",
            "2.000 0.0 2 host thread 0 issues",
        ],
    )
    def test_it_has_a_row_for_everything(self, result, row):
        rows = [" ".join(line.split()) for line in result.summary().splitlines()]
        assert row in rows


class TestPlot:
    def test_bars_are_where_launches_run(self, result, tmp_path, monkeypatch):
        axes_module = pytest.importorskip("matplotlib.axes")
        drawn: dict[tuple[float, str], list] = {}

        def kept(self, spans, rows, *, facecolors, **rest):
            drawn[rows[0] + rows[1] / 2, facecolors] = [*spans]

        monkeypatch.setattr(axes_module.Axes, "broken_barh", kept)
        result.plot(tmp_path / "step.svg")
        issue, wait, kernel, copy = "#5d9b6b", "#d9d9d9", "#3b6fb6", "#e08b2c"
        filled = {key: [(round(a), round(b)) for a, b in spans] for key, spans in drawn.items() if spans}
        # Rows: two host threads, device 0, device 1, stream 5 of device 1.
        assert filled == {
            (0, issue): [(0, 1), (1, 1), (2, 1), (10001, 1)],
            (1, issue): [(1, 0)],
            (2, kernel): [(1, 2000), (10002, 1000)],
            (2, copy): [(2001, 3000)],
            (3, kernel): [(5001, 4000)],
            (3, wait): [(1, 5000)],
            (4, copy): [(9001, 1000)],
            (4, wait): [(3, 8998)],
        }

    def test_without_matplotlib_an_error_says_what_to_do(self, result, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(RuntimeError, match="plot draws with matplotlib, which is not installed: pip install"):
            result.plot(tmp_path / "step.png")
        assert [*tmp_path.iterdir()] == []


class TestSave:
    @pytest.fixture
    def events(self, result, tmp_path) -> list[dict]:
        result.save(tmp_path / "step.json")
        return json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["traceEvents"]

    def test_it_is_called_a_prediction(self, events, tmp_path):
        about = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["otherData"]
        assert about == {"machine": "hand-made", "times": "a prediction, not a measurement"}

    def test_slices_that_touch_still_touch_when_rounded_to_nanoseconds(self, tmp_path):
        program = Program()
        for _ in range(9):
            program.kernel((0, 0), 0)
        schedule(program.recording(), machine(1, kernel_latency=1.6e-9)).save(tmp_path / "short.json")
        events = json.loads((tmp_path / "short.json").read_text(encoding="utf-8"))["traceEvents"]
        spans = [(round(1e3 * one["ts"]), round(1e3 * one["dur"])) for one in events if one.get("cat") == "kernel"]
        assert [start + length for start, length in spans[:-1]] == [start for start, _ in spans[1:]]

    def test_rows_have_names_and_a_slice_says_in_microseconds_what_the_launch_is(self, events):
        names = {event["args"]["name"] for event in events if event["ph"] == "M"}
        assert {"host", "device 1", "host thread 1", "device 1 stream 5"} <= names
        (event,) = [event for event in events if event["ph"] == "X" and event["args"].get("stack")]
        assert (event["name"], event["ts"], event["dur"]) == ("relu", 5_001_000, 4_000_000)
        assert event["args"]["stack"] == "step.py:7"
        assert event["args"]["starts after"] == "launch 1 (_copy_from 0 to 1), by its wait"

    def test_arrows_lead_from_what_is_waited_for_to_what_waits(self, events):
        slices = {
            (event["pid"], event["tid"], event["ts"]): event["args"]["launch"] for event in events if event["ph"] == "X"
        }
        ends: dict[int, list[int]] = {}
        for event in events:
            if event["ph"] in "sf":
                ends.setdefault(event["id"], []).append(slices[event["pid"], event["tid"], event["ts"]])
        # Waits of streams, and the host's wait for the copy back. That copy is ordered after the stream that it joins.
        assert sorted(map(tuple, ends.values())) == [(1, 2), (1, 3), (2, 3), (3, 4), (3, 4)]
