"""Random programs of torch on several devices, with every ordering that they need and few others.

`generate` makes a program: operators on views of buffers, each on a stream, in phases of one or several host threads.
Before each operator come waits for what it conflicts with, of a random kind. `Order` is a second, slow implementation
of what orders what, by which the generator knows which waits are needed. This file imports no torch; `run_random` runs
the programs.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

DEVICES, STREAMS, ELEMENTS = 3, 3, 36

Stream = tuple[int, int]  # a device, and 0 for its default stream
VIEWS = {
    "all": slice(0, 36),
    "front": slice(0, 18),
    "back": slice(18, 36),
    "even": slice(0, 36, 2),
    "odd": slice(1, 36, 2),
    "columns": "columns",  # 0 to 2 of 6 x 6
    "others": "others",  # 3 to 5
}


def elements(view: str) -> frozenset[int]:
    """Which elements of a buffer a view has."""
    if view in ("columns", "others"):
        first = 0 if view == "columns" else 3
        return frozenset(6 * row + column for row in range(6) for column in range(first, first + 3))
    return frozenset(range(ELEMENTS)[VIEWS[view]])


@dataclass(frozen=True)
class Step:
    """What a thread does: ``kind`` says what the other fields mean."""

    kind: str
    stream: Stream = (0, 0)
    other: Stream = (0, 0)
    event: int = -1
    op: str = ""
    number: int = 0
    reads: tuple[tuple[int, str], ...] = ()  # buffers and views
    writes: tuple[tuple[int, str], ...] = ()
    buffer: int = -1
    device: int = -1
    streams: tuple[Stream, ...] = ()  # that have used a buffer

    @property
    def waits(self) -> bool:
        return self.kind in (
            "wait_stream",
            "wait_event",
            "synchronize_stream",
            "synchronize_event",
            "synchronize_device",
        )


@dataclass
class Phase:
    lanes: list[list[Step]]
    in_threads: bool


@dataclass
class Program:
    phases: list[Phase] = field(default_factory=list)

    def steps(self) -> Iterator[tuple[int, int, int, Step]]:
        for p, phase in enumerate(self.phases):
            for t, lane in enumerate(phase.lanes):
                for s, step in enumerate(lane):
                    yield p, t, s, step

    def without(self, place: tuple[int, int, int]) -> Program:
        return Program(
            [
                Phase(
                    [[step for s, step in enumerate(lane) if (p, t, s) != place] for t, lane in enumerate(phase.lanes)],
                    phase.in_threads,
                )
                for p, phase in enumerate(self.phases)
            ]
        )


Clock = dict[Stream, int]


def join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


class Order:
    """What is ordered after what, and which accesses are not."""

    def __init__(self) -> None:
        self.streams: defaultdict[Stream, Clock] = defaultdict(dict)
        self.events: dict[int, Clock] = {}
        self.known: Clock = {}  # of the thread that runs
        self.writes: dict[tuple[int, int], tuple[Stream, int]] = {}
        self.reads: defaultdict[tuple[int, int], dict[Stream, int]] = defaultdict(dict)
        self.last_event: dict[tuple[Stream, int], int] = {}

    def conflicts(self, step: Step) -> set[tuple[Stream, int]]:
        """The accesses that the step has to come after."""
        found = set()
        for buffer, view in step.reads + step.writes:
            for element in elements(view):
                if (buffer, element) in self.writes:
                    found.add(self.writes[buffer, element])
        for buffer, view in step.writes:
            for element in elements(view):
                found.update(self.reads[buffer, element].items())
        return found

    def unordered(self, step: Step) -> set[tuple[Stream, int]]:
        clock = dict(self.known)
        if step.kind == "launch":
            join(clock, self.streams[step.stream])
        return {(stream, tick) for stream, tick in self.conflicts(step) if clock.get(stream, 0) < tick}

    def do(self, step: Step) -> None:
        clock = self.streams[step.stream]
        if step.kind == "launch":
            join(clock, self.known)
            clock[step.stream] = clock.get(step.stream, 0) + 1
            access = step.stream, clock[step.stream]
            for buffer, view in step.reads:
                for element in elements(view):
                    self.reads[buffer, element][step.stream] = access[1]
            for buffer, view in step.writes:
                for element in elements(view):
                    self.writes[buffer, element] = access
                    self.reads[buffer, element] = {}
        elif step.kind == "record":
            join(clock, self.known)
            self.events[step.event] = dict(clock)
        elif step.kind == "wait_stream":
            join(clock, self.streams[step.other])
            join(clock, self.known)  # wait_stream records an event
        elif step.kind == "wait_event":
            join(clock, self.events[step.event])
        elif step.kind == "synchronize_stream":
            join(self.known, self.streams[step.other])
        elif step.kind == "synchronize_event":
            join(self.known, self.events[step.event])
        elif step.kind == "synchronize_device":
            for stream in list(self.streams):
                if stream[0] == step.device:
                    join(self.known, self.streams[stream])

    def run(self, program: Program) -> bool:
        """True if every access comes after those that it conflicts with."""
        for phase in program.phases:
            before, after = self.known, dict(self.known)
            for lane in phase.lanes:
                self.known = dict(before) if phase.in_threads else before
                for step in lane:
                    if self.unordered(step):
                        return False
                    self.do(step)
                join(after, self.known)
            self.known = after
        return True


class Generator:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.order = Order()
        self.devices: dict[int, int] = {}  # of each buffer that exists; -1 is pinned memory
        self.homes: dict[int, Stream] = {}
        self.used: defaultdict[int, set[Stream]] = defaultdict(set)
        self.buffers = self.events = 0
        self.lane: list[Step] = []
        self.ends: dict[tuple[Stream, int], int] = {}  # events recorded after an access

    def program(self) -> Program:
        result = Program()
        choose = self.random
        self.lane = []
        for device in [*range(DEVICES), -1, -1]:
            for _ in range(2):
                self.new_buffer(device)
        result.phases.append(Phase([self.lane], False))
        for _ in range(choose.randint(2, 4)):
            kind = choose.choice(["here", "thread", "threads"])
            if kind == "threads":  # or a thread could wait for a stream that another one is using
                self.lane = []
                for device in range(DEVICES):
                    self.add(Step("synchronize_device", device=device))
                self.used = defaultdict(set, {buffer: {home} for buffer, home in self.homes.items()})
                result.phases.append(Phase([self.lane], False))
            before = dict(self.order.known)
            lanes, after = [], dict(before)
            devices = list(range(DEVICES))
            choose.shuffle(devices)
            pinned = [buffer for buffer, device in self.devices.items() if device == -1]
            shares = (
                [(devices, pinned)] if kind != "threads" else [(devices[:1], pinned[:1]), (devices[1:], pinned[1:])]
            )
            for share, of_host in shares:
                self.lane = []
                self.order.known = dict(before)
                for _ in range(choose.randint(4, 9)):
                    self.something(share, of_host)
                lanes.append(self.lane)
                join(after, self.order.known)
            self.order.known = after
            result.phases.append(Phase(lanes, kind != "here"))
        return result

    def new_buffer(self, device: int, stream: Stream | None = None) -> None:
        number = self.buffers
        self.buffers += 1
        self.devices[number] = device
        if device >= 0:
            self.homes[number] = stream or (device, 0)
            self.used[number] = {self.homes[number]}
            step = Step("launch", self.homes[number], op="new", number=number, writes=((number, "all"),), buffer=number)
        else:
            step = Step("host", op="new", number=number, writes=((number, "all"),), buffer=number)
        self.add(step)

    def add(self, step: Step) -> None:
        self.lane.append(step)
        self.order.do(step)

    def event_on(self, stream: Stream) -> int:
        self.events += 1
        self.add(Step("record", stream, event=self.events))
        return self.events

    def something(self, devices: list[int], pinned: list[int]) -> None:
        choose = self.random
        kind = choose.choices(
            ["update", "combine", "copy", "host", "temporary", "backward", "replace", "scatter"],
            [5, 4, 5, 3, 2, 1, 2, 1],
        )[0]
        here = [buffer for buffer, device in self.devices.items() if device in devices]
        buffer = choose.choice(here)
        device = self.devices[buffer]
        stream = device, choose.randrange(STREAMS)
        view, other_view = choose.sample(list(VIEWS)[1:], 2)
        number = choose.randint(1, 9)
        if kind in ("update", "backward", "scatter"):
            self.launch(
                Step("launch", stream, op=kind, number=number, reads=((buffer, view),), writes=((buffer, view),))
            )
        elif kind in ("combine", "temporary"):
            source = choose.choice([one for one in here if self.devices[one] == device])
            other = device, choose.randrange(STREAMS)
            step = Step(
                "launch",
                stream,
                other if kind == "temporary" else stream,
                op=kind,
                number=number,
                reads=((source, other_view),),
                writes=((buffer, view),),
            )
            if kind == "temporary":
                self.temporary(step)
            else:
                self.launch(step)
        elif kind == "copy":
            places = here + pinned
            source, target = choose.sample(places, 2) if len(places) > 1 else (places[0], places[0])
            ends = self.devices[source], self.devices[target]
            if source == target or max(ends) < 0:
                return
            device = ends[0] if ends[0] >= 0 else ends[1]
            # A copy between devices takes the current streams of both: torch lets each wait for the other.
            stream = device, choose.randrange(STREAMS)
            if min(ends) >= 0 and ends[0] != ends[1]:
                self.between(stream, (ends[1], choose.randrange(STREAMS)), source, target, view)
            else:
                if min(ends) < 0:  # elements that are not in one piece are packed by the host
                    view = choose.choice(["all", "front", "back"])
                self.launch(
                    Step("launch", stream, stream, op="copy", reads=((source, view),), writes=((target, view),))
                )
        elif kind == "host" and pinned:
            buffer = choose.choice(pinned)
            if choose.random() < 0.5:
                self.host(Step("host", op="read", reads=((buffer, view),)))
            else:
                self.host(Step("host", op="write", number=number, writes=((buffer, view),)))
        elif kind == "replace":
            self.replace(buffer, stream)

    def between(self, stream: Stream, target_stream: Stream, source: int, target: int, view: str) -> None:
        """What `Order` calls a launch on the source's stream, with the barrier that torch makes around it."""
        step = Step("launch", stream, target_stream, op="copy", reads=((source, view),), writes=((target, view),))
        self.make_ordered(step, (target_stream, stream))
        self.lane.append(Step("barrier"))
        self.order.do(Step("wait_stream", stream, target_stream))
        self.lane.append(step)
        self.order.do(step)
        self.order.do(Step("wait_stream", target_stream, stream))
        self.noted(step)

    def launch(self, step: Step) -> None:
        self.make_ordered(step, (step.stream,))
        self.add(step)
        self.noted(step)

    def noted(self, step: Step) -> None:
        for buffer, _ in step.reads + step.writes:
            self.used[buffer].add(step.stream)
        if self.random.random() < 0.4:
            access = step.stream, self.order.streams[step.stream][step.stream]
            self.ends[access] = self.event_on(step.stream)

    def temporary(self, step: Step) -> None:
        """A tensor made on one stream, used on another, and freed at once, with `record_stream`."""
        first = Step("launch", step.other, op="make", number=step.number, reads=step.reads)
        self.make_ordered(first, (first.stream,))
        self.add(first)
        if step.other != step.stream:
            self.add(Step("wait_stream", step.stream, step.other))
        rest = Step("launch", step.stream, step.other, op="take", writes=step.writes)
        self.make_ordered(rest, (rest.stream,))
        self.add(rest)
        self.noted(step)

    def host(self, step: Step) -> None:
        while unordered := self.order.unordered(step):
            self.let_host_wait(*min(unordered))
        self.add(step)

    def replace(self, buffer: int, stream: Stream) -> None:
        """Frees a buffer and makes another, which may get its memory."""
        home = self.homes[buffer]
        others = sorted(self.used[buffer] - {home})
        # torch ignores record_stream of a default stream for memory of another device's default stream: their handles
        # are equal.
        recorded = [one for one in others if home[1] or one[1]] if self.random.random() < 0.5 else []
        for used in others:
            if used not in recorded:
                self.add(Step("wait_stream", home, used))
        self.add(Step("free", buffer=buffer, streams=tuple(recorded)))
        device = self.devices.pop(buffer)
        self.new_buffer(device, self.random.choice([home, stream]))

    def make_ordered(self, step: Step, streams: tuple[Stream, ...]) -> None:
        """Adds waits until the step comes after all that it conflicts with. One of the streams waits, or the host."""

        def missing() -> set[tuple[Stream, int]]:
            clock = dict(self.order.known)
            for stream in streams:
                join(clock, self.order.streams[stream])
            return {(stream, tick) for stream, tick in self.order.conflicts(step) if clock.get(stream, 0) < tick}

        while found := missing():
            earlier, tick = min(found)
            waiting = self.random.choice(streams)
            how = self.random.choices(["stream", "event", "old event", "host"], [3, 3, 3, 1])[0]
            if how == "host":
                self.let_host_wait(earlier, tick)
            elif how == "old event" and (earlier, tick) in self.ends:
                self.add(Step("wait_event", waiting, event=self.ends[earlier, tick]))
            elif how == "stream":
                self.add(Step("wait_stream", waiting, earlier))
            else:
                self.add(Step("wait_event", waiting, event=self.event_on(earlier)))

    def let_host_wait(self, earlier: Stream, tick: int) -> None:
        how = self.random.choice(["stream", "event", "old event", "device"])
        if how == "device":
            self.add(Step("synchronize_device", device=earlier[0]))
        elif how == "old event" and (earlier, tick) in self.ends:
            self.add(Step("synchronize_event", event=self.ends[earlier, tick]))
        elif how == "event":
            self.add(Step("synchronize_event", event=self.event_on(earlier)))
        else:
            self.add(Step("synchronize_stream", other=earlier))


def generate(seed: int) -> Program:
    return Generator(seed).program()


def with_barriers(program: Program) -> Program:
    """The same for `Order`, which does not know that a copy between devices orders two streams."""
    phases = []
    for phase in program.phases:
        lanes = []
        for lane in phase.lanes:
            steps: list[Step] = []
            for index, step in enumerate(lane):
                if step.kind == "barrier":
                    steps.append(Step("wait_stream", lane[index + 1].stream, lane[index + 1].other))
                elif index > 0 and lane[index - 1].kind == "barrier":
                    steps += [step, Step("wait_stream", step.other, step.stream)]
                else:
                    steps.append(step)
            lanes.append(steps)
        phases.append(Phase(lanes, phase.in_threads))
    return Program(phases)


def is_ordered(program: Program) -> bool:
    return Order().run(with_barriers(program))


def with_one_wait_left_out(program: Program, seed: int) -> Program | None:
    """The program without a wait that it needs, or None if it needs none."""
    waits = [(p, t, s) for p, t, s, step in program.steps() if step.waits]
    random.Random(seed).shuffle(waits)
    for place in waits:
        less = program.without(place)
        if not is_ordered(less):
            return less
    return None
