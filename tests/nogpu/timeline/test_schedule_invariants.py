"""What holds for every recording on every machine."""

import copy
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nogpu.timeline import (
    HOST,
    Host,
    Launch,
    Machine,
    Recording,
    StreamName,
    Wiring,
    schedule,
)
from nogpu.timeline.solve import host_order, stream_before
from nogpu.timeline.wiring import mesh, switch, through_host, tree

pytestmark = pytest.mark.devices("cpu")  # no device takes part: once is enough

DEVICES = 3
STREAMS = tuple(StreamName(device, stream) for device in range(DEVICES) for stream in (0, 7))


@st.composite
def recordings(draw: st.DrawFn, peers: bool = True) -> Recording:
    found: list[Launch] = []
    graphs: dict[int, int | None] = {}  # for each thread that of its last launch
    for index in range(draw(st.integers(0, 24))):
        launch = draw(launches(index))
        if peers and launch.copy is None:
            launch = replace(launch, peers=draw(st.just(()) | peers_of(STREAMS[launch.stream].device)))
        graph = draw(st.sampled_from([None, index, graphs.get(launch.thread)]))
        graphs[launch.thread] = graph
        found.append(replace(launch, graph=graph))
    return Recording(STREAMS, tuple(found))


def peers_of(device: int) -> st.SearchStrategy[tuple[tuple[int, int, int], ...]]:
    pairs = [ends for other in range(DEVICES) if other != device for ends in ((device, other), (other, device))]
    return st.lists(st.tuples(st.sampled_from(pairs), st.integers(0, 9)), max_size=3).map(
        lambda found: tuple((*ends, nbytes) for ends, nbytes in found)
    )


@st.composite
def launches(draw: st.DrawFn, index: int) -> Launch:
    stream = draw(st.integers(0, len(STREAMS) - 1))
    device = STREAMS[stream].device
    others = [place for place in (HOST, *range(DEVICES)) if place != device]
    pairs = [*((device, other) for other in others), (HOST, device)]
    earlier = st.lists(st.integers(0, index - 1), max_size=2).map(tuple) if index else st.just(())
    is_copy = draw(st.booleans())
    return Launch(
        index,
        draw(st.sampled_from(["aten::a", "aten::b"])),
        draw(st.integers(0, 2)),
        draw(st.booleans()),
        stream,
        draw(st.integers(0, 9)),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 9)),
        "float32",
        (),
        draw(st.sampled_from(pairs)) if is_copy else None,
        draw(earlier),
        None,
        draw(earlier) if draw(st.booleans()) else (),
        draw(earlier),
        draw(st.floats(0, 3)),
    )


rates, costs = st.floats(0.1, 10), st.floats(0, 5)


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    hosted = through_host(DEVICES, bandwidth=draw(rates), latency=draw(costs), copies=draw(st.sampled_from([None, 1])))
    wiring = draw(
        st.sampled_from(
            [
                hosted,
                switch(
                    DEVICES,
                    bandwidth=draw(rates),
                    latency=draw(costs),
                    host_bandwidth=draw(rates),
                    host_latency=draw(costs),
                ),
                mesh({(0, 1): draw(rates)}, hosted, latency=draw(costs), engines=1),
                tree([[0, 1], [2]], bandwidth=draw(rates), latency=draw(costs), uplink=draw(rates)),
            ]
        )
    )
    paths = {ends: replace(path, for_kernels=True) for ends, path in wiring.paths.items()}
    return Wiring({link: draw(st.integers(1, 2)) for link in wiring.links}, paths)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    host = Host(draw(costs), draw(costs), draw(costs), draw(st.none() | costs), draw(st.none() | st.integers(1, 3)))
    host = replace(host, graph=draw(costs))
    flops = {"float32": draw(rates)}
    share = draw(st.sampled_from([1.0, 0.7]))
    return Machine("drawn", DEVICES, flops, draw(rates), draw(costs), draw(wirings()), host, peer_kernels=share)


def fair_merge(recording: Recording) -> list[int]:
    """The host order, from its description: in each unit of time each thread makes one call, if it can."""
    order: list[int] = []
    issued: set[int] = set()
    before = stream_before(recording)
    while len(order) < len(recording.launches):
        busy: set[int] = set()
        for launch in recording.launches:
            known = {*launch.waits, *launch.host_waits, *launch.issued_after, before[launch.index]} - {None}
            if launch.index in issued or launch.thread in busy:
                continue
            if launch.is_call or not known <= issued:
                busy.add(launch.thread)  # this one is the next of its thread, now or later
            if known <= issued:
                issued.add(launch.index)
                order.append(launch.index)
    return order


@given(recordings(peers=False))
def test_the_host_order_is_the_fair_merge(recording):
    assert host_order(recording) == fair_merge(recording)


@given(recordings(peers=False), machines())
def test_each_time_is_the_latest_of_what_it_waits_for(recording, machine):
    solution = schedule(recording, machine).solution
    before, order = stream_before(recording), fair_merge(recording)
    own: dict[int, float] = {}
    released: dict[int, float] = {}  # by Python thread
    ends: dict[str, list[float]] = {link: [] for link in machine.wiring.links}
    for index in order:
        launch = recording.launches[index]
        on_stream = [] if before[index] is None else [before[index]]
        at_a_time = machine.host.cores or 1
        own_too = machine.host.cores is None
        busy = sorted(time for thread, time in released.items() if own_too or thread != launch.thread)
        issue = max(
            [
                own.get(launch.thread, 0.0),
                0.0 if launch.in_backward or not launch.is_call or len(busy) < at_a_time else busy[-at_a_time],
                *(solution.end[other] for other in launch.host_waits),
                *(solution.issue[other] for other in (*launch.issued_after, *launch.waits, *on_stream)),
            ]
        )
        locked, rest = machine.host.cost(launch)
        reached = issue + locked + rest
        assert (solution.issue[index], solution.reached[index]) == (issue, reached)
        own[launch.thread] = reached
        if launch.is_call and not launch.in_backward:
            released[launch.thread] = issue + locked
        links = machine.wiring.paths[launch.copy].links if launch.copy else ()
        free = [sorted(ends[link])[-machine.wiring.links[link]] for link in links if link_is_full(ends, machine, link)]
        start = max([reached, *(solution.end[other] for other in (*launch.waits, *on_stream)), *free])
        assert solution.start[index] == start
        for link in links:
            ends[link].append(solution.end[index])


def link_is_full(ends: dict[str, list[float]], machine: Machine, link: str) -> bool:
    return len(ends[link]) >= machine.wiring.links[link]


@given(recordings(), machines())
def test_links_never_serve_more_copies_than_they_can(recording, machine):
    result = schedule(recording, machine)
    changes: dict[str, list[tuple[float, int]]] = {}
    for move in result.solution.moves:
        if move.start < move.end:
            for link in machine.wiring.paths[move.ends].links:
                changes.setdefault(link, []).extend([(move.start, 1), (move.end, -1)])  # at one time ends go first
    for link, found in changes.items():
        assert max(accumulate(change for _, change in sorted(found))) <= machine.wiring.links[link]


@given(recordings(), machines())
def test_a_step_is_not_shorter_than_what_one_of_its_parts_is_busy(recording, machine):
    result = schedule(recording, machine)
    enough = result.time * (1 + 1e-9) + 1e-12
    work: Counter[str] = Counter()
    longest: list[float] = []
    before = stream_before(recording)
    for launch in recording.launches:
        seconds = result.end[launch.index] - result.start[launch.index]
        locked, rest = machine.host.cost(launch)
        work[f"stream {launch.stream}"] += seconds
        work[f"thread {launch.thread}"] += locked + rest
        work["lock"] += 0.0 if launch.in_backward else locked / (machine.host.cores or 1)
        after = [*launch.waits, *([] if before[launch.index] is None else [before[launch.index]])]
        longest.append(seconds + max((longest[other] for other in after), default=0.0))
    for move in result.solution.moves:
        for link in machine.wiring.paths[move.ends].links:
            work[f"link {link}"] += (move.end - move.start) / machine.wiring.links[link]
    assert max(work.values(), default=0.0) <= enough
    assert max(longest, default=0.0) <= enough
    assert all(busy.kernels <= enough and busy.copies <= enough for busy in (*result.streams, *result.devices))
    assert all(seconds <= enough for seconds in (*result.links.values(), result.communication))


@given(recordings(), machines())
def test_the_critical_path_has_no_gap_and_takes_the_whole_time(recording, machine):
    result = schedule(recording, machine)
    steps = result.critical_path
    if result.time == 0:
        assert steps == []
        return
    assert (steps[0].start, steps[-1].end) == (0, result.time)
    assert all(one.end == other.start for one, other in pairwise(steps))
    assert sum(step.seconds for step in steps) == pytest.approx(result.time)
    for step in steps:
        launch, bound = recording.launches[step.launch], step.bound
        assert step.op == launch.op
        if bound.kind == "wait":
            assert bound.launch in launch.waits
        elif bound.kind == "host wait":
            assert bound.launch in launch.host_waits
        elif bound.kind == "stream":
            assert recording.launches[bound.launch].stream == launch.stream
        elif bound.kind == "link":
            moves = [move for move in result.solution.moves if move.launch == bound.launch]
            links = {link for move in moves for link in machine.wiring.paths[move.ends].links}
            assert bound.link in links & {*machine.wiring.paths[launch.copy].links}


@given(recordings(), machines())
def test_waits_are_what_keeps_launches_that_could_start(recording, machine):
    result = schedule(recording, machine)
    before = stream_before(recording)
    charged: Counter[int] = Counter()
    for wait in result.waits:
        assert wait.seconds > 0
        charged[wait.launch] += wait.seconds
    for launch in recording.launches:
        other = before[launch.index]
        free = max(result.solution.reached[launch.index], 0.0 if other is None else result.end[other])
        assert charged[launch.index] == pytest.approx(result.start[launch.index] - free)
    assert [wait.seconds for wait in result.waits] == sorted((wait.seconds for wait in result.waits), reverse=True)
    assert sum(group.seconds for group in result.grouped_waits) == pytest.approx(sum(charged.values()))
    assert sum(group.count for group in result.grouped_waits) == len(result.waits)


@given(recordings(), machines())
def test_every_byte_is_moved_once_and_at_no_more_than_the_bandwidth(recording, machine):
    moved: defaultdict[tuple[int, int], float] = defaultdict(float)
    for move in schedule(recording, machine).solution.moves:
        if recording.launches[move.launch].peers:
            path = machine.wiring.paths[move.ends]
            moved[move.ends] += (move.end - move.start) * path.bandwidth * machine.peer_kernels
    asked: Counter[tuple[int, int]] = Counter()
    for launch in recording.launches:
        for source, target, nbytes in launch.peers:
            asked[source, target] += nbytes
    assert moved == pytest.approx(asked, abs=1e-9)


@given(recordings(), machines())
def test_shares_are_shares(recording, machine):
    result = schedule(recording, machine)
    assert 0 <= result.exposed_communication <= result.time
    assert 0 <= result.overlap <= 100
    assert -1e-9 <= result.host_idle <= result.time
    for device in result.devices:
        own = [busy.kernels for busy in result.streams if busy.name.device == device.name]
        assert max(own) <= device.kernels + 1e-9
        assert device.kernels <= sum(own) + 1e-9
    for thread in result.threads:
        parts = (thread.seconds, thread.for_devices, thread.for_others, thread.idle)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(result.time)


@given(recordings(), machines())
def test_the_same_recording_has_the_same_schedule(recording, machine):
    links = dict(reversed(machine.wiring.links.items()))
    again = machine.with_(wiring=replace(machine.wiring, links=links))
    first, second = schedule(recording, machine), schedule(copy.deepcopy(recording), again)
    assert first.solution.start == second.solution.start
    assert first.critical_path == second.critical_path
    assert first.waits == second.waits
    assert first.summary() == second.summary()
