"""A schedule as a table of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dataparallel.testing.simulated.timeline.answers import Answers
from dataparallel.testing.simulated.timeline.delays import WaitGroup
from dataparallel.testing.simulated.timeline.names import by_device, name_of_launch, name_of_stream

__all__ = ["table"]

ROWS = 10
"""How many waits, links and parts of the critical path are shown, the largest first."""


def table(answers: Answers) -> str:
    """The whole table. Times are milliseconds."""
    parts = [_step(answers), _devices(answers), _streams(answers), _links(answers), _threads(answers)]
    return "\n\n".join(part for part in (*parts, _waits(answers), _critical_path(answers)) if part) + "\n"


def _step(answers: Answers) -> str:
    launches = answers.recording.launches
    copies = sum(launch.copy is not None for launch in launches)
    exposed, time = answers.exposed_communication, answers.time
    share = f"{100 * exposed / time if time else 0:.1f} % of the step"
    rows = [
        ("step", _ms(time), f"{len(launches)} launches, {copies} of them copies between two places"),
        ("any link is busy", _ms(answers.communication), f"{answers.overlap:.1f} % of it the step does not wait for"),
        ("exposed communication", _ms(exposed), share),
        ("no thread issues", _ms(answers.host_idle), ""),
    ]
    title = f"A prediction for {answers.machine.name}. Times are in ms."
    return f"{title}\n\n{_aligned(rows, text={0, 2})}"


def _devices(answers: Answers) -> str:
    rows = [
        (
            str(device.name),
            str(device.launches),
            _ms(device.kernels),
            _ms(device.copies),
            _share(answers, device.kernels),
        )
        for device in answers.devices
    ]
    return _aligned([("device", "launches", "kernels", "copies", "% kernels"), *rows])


def _streams(answers: Answers) -> str:
    found = [(answers.recording.streams[at], answers.streams[at]) for at in by_device(answers.recording.streams)]
    rows = [
        (name_of_stream(name), str(busy.launches), _ms(busy.kernels), _ms(busy.copies))
        for name, busy in found
        if busy.launches
    ]
    return _aligned([("stream", "launches", "kernels", "copies"), *rows])


def _links(answers: Answers) -> str:
    used = sorted(((seconds, link) for link, seconds in answers.links.items() if seconds), reverse=True)
    rows = [(link, _ms(seconds), _share(answers, seconds)) for seconds, link in used[:ROWS]]
    return _aligned([(_first("link", used), "busy", "% busy"), *rows]) if used else ""


def _threads(answers: Answers) -> str:
    head = ("host thread", "launches", "issues", "waits for devices", "for other threads", "idle")
    rows = [
        (str(one.number), str(one.launches), *map(_ms, (one.seconds, one.for_devices, one.for_others, one.idle)))
        for one in answers.threads
    ]
    return _aligned([head, *rows])


def _waits(answers: Answers) -> str:
    groups = answers.grouped_waits
    rows = [(_ms(group.seconds), str(group.count), *_ends(group)) for group in groups[:ROWS]]
    return _aligned([("waits", "times", _first("launch", groups), "waits for"), *rows], text={2, 3}) if groups else ""


def _ends(group: WaitGroup) -> tuple[str, str]:
    one, other = (op.removeprefix("aten::") for op in (group.op, group.for_op))
    link = f"link {group.link}, which serves " if group.link else ""
    return f"{one} on {name_of_stream(group.stream)}", f"{link}{other} on {name_of_stream(group.for_stream)}"


def _critical_path(answers: Answers) -> str:
    """Where the time of the step goes: the critical path, summed by what its launches do and where."""
    launches, streams = answers.recording.launches, answers.recording.streams
    sums: dict[str, tuple[float, int]] = {}
    for step in answers.critical_path:
        launch = launches[step.launch]
        if step.on == "host":
            what = f"host thread {launch.thread} issues"
        else:
            what = f"{name_of_launch(launch)} on {name_of_stream(streams[launch.stream])}"
        seconds, count = sums.get(what, (0.0, 0))
        sums[what] = (seconds + step.seconds, count + 1)
    largest = sorted(sums.items(), key=lambda item: -item[1][0])
    rows = [(_ms(seconds), _share(answers, seconds), str(count), what) for what, (seconds, count) in largest[:ROWS]]
    head = ("ms", "%", "times", _first("on the critical path", largest))
    return _aligned([head, *rows], text={3}) if rows else ""


def _first(what: str, found: Sequence[object]) -> str:
    return f"{what} (first {ROWS} of {len(found)})" if len(found) > ROWS else what


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _share(answers: Answers, seconds: float) -> str:
    return f"{100 * seconds / answers.time if answers.time else 0:.1f}"


def _aligned(rows: Iterable[tuple[str, ...]], text: Iterable[int] = (0,)) -> str:
    """Rows as lines, in columns. Columns in `text` are flush left, others flush right."""
    lines, left = [*rows], {*text}
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    )
