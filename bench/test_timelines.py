"""What a training step of models of real size would take on published machines: predictions, by timelines.

Each model has a process of its own, in which kernels are skipped (`timelines`). The predictions are not judged. How
they are made is tested on recordings that are made by hand.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from by_hand import launch
from child_processes import printed_by
from nogpu.timeline import HOST, Host, Launch, Machine, Recording, StreamName
from nogpu.timeline.presets import A100, RTX_3090
from nogpu.timeline.wiring import switch
from process_timelines import Alone, Arrival, Unit
from published import DDP, DP, ONE, PUBLISHED, PUBLISHED_SHAPES, SOURCES, Published
from recorded import Recorded
from reporting import Report, Row
from shapes import GPT2_SMALL, GPT_768, REAL_SHAPES, RESNET50, RealShape
from timelines import (
    ALL_REDUCED,
    ALONE,
    FSDP2,
    NOT_RESHARDED,
    PEER_KERNELS,
    PREDICTED_BY,
    REPLICATE,
    SHAPES,
    SHARDED,
    SLOWER,
    TORCH,
    asked,
    predict,
    predictions,
)

HOST_BOUND = 1.1
"""A step is host-bound if it takes more than this times as long as with a host whose launches cost nothing."""

CAPTION = f"""\
Predictions: nothing here was measured on such devices. A training step was recorded on simulated devices that skip
kernels, and scheduled on published machines with the shares of their peaks that are stated in
nogpu/timeline/presets.py. float32, TF32 where devices have it; forward, backward and SGD;
inputs from pinned memory of the host.

step, ms
    What one more step takes, where the host may run ahead of the devices.
from idle, ms
    A step that begins with idle devices and ends when they are idle again.
free host, ms
    One more step if launching cost nothing.
bound, ms
    The module alone with one device's samples, no communication and a free host. No way can be faster.
of bound
    The bound divided by the step.
efficiency
    Of weak scaling: the step of the module alone with one device's samples, divided by this step.
exposed
    The part of the step that it is longer than if copies took no time.
launches, copies
    Operators in a step, and those of them that copy between devices, or between a device and the host.
received, of all-reduce
    Megabytes that a device gets from others in a step, on the device that gets most; and the same divided by what an
    all-reduce of the gradients brings to each device, which is 2 (N - 1) / N of their size. Not for DDP and FSDP2.
Python, ms
    CPU time of Python's threads between the launches of a step, measured, and scaled by the factor that makes it fit
    the machine's host for the module alone. Of the simulator's work it includes only how operators are dispatched, and
    operators that are no launch.
bound by
    "host" if the step takes more than {HOST_BOUND:g} times as long as with a free host; otherwise "devices".

composable.fully_shard has a unit for each block, and one for the rest. On A100 and H100, where NVLink joins all pairs,
its gathers and sums are kernels that read peers, with the bandwidth of copies; "kernels at 70 %" has 70 % of it. On
V100 and RTX 3090 they are copies. Threads of a backward pass that run nodes written in Python hold the interpreter lock
in reality. Here they hold none, so the time of the host in backward is predicted too low.

DDP and FSDP2 are made of the recording of the module alone: a process and a host for each device, and no process waits
for a slower one. This is the best that they can do. An all-reduce for each bucket of 25 MiB starts as soon as its
gradients are there; it has the bandwidth of one link, or NCCL's where that is more. FSDP2 has the same units as
composable.fully_shard, and an optimizer of an N-th: copies into and out of what is sent, an all-gather one unit ahead
and a reduce-scatter, at NCCL's published bandwidth where there is one. Buffers are not sent.

{TORCH} is torch's pipeline with plain copies, which is what it does without NCCL.
Where torch was built with NCCL, its broadcast and its sum take less time than here."""

PUBLISHED_CAPTION = f"""\
Published times of a training step beside predictions for the same model, batch and machine. What differs: DDP is one
process for each device, whose host costs nothing to the others, and sums with NCCL; its prediction is that of
composable.replicate, one process. Predicted steps end with SGD. Published steps may have another optimizer and read
their data from files, and ran on other versions of torch. Convolutions are predicted at one share of the peak for all
shapes. The prediction for one device tells how good the shares are, and the ratio to one device how good the rest is.
The sources:

{chr(10).join(f"{name}{chr(10)}    {source}" for name, source in SOURCES.items())}"""


def of_all_reduce(row: Row) -> str:
    """What is received over what an all-reduce of the gradients, in float32, would bring to each device."""
    devices = row["devices"]
    if devices == 1 or row["received"] is None:
        return ""
    return f"{1e6 * row['received'] / (2 * (devices - 1) / devices * 4 * SHAPES[row['model']].parameters):.2f}"


TABLE = {
    "model": "{model}",
    "machine": "{machine}",
    "way": "{way}",
    "devices": "{devices}",
    "step, ms": "{step:.1f}",
    "from idle, ms": "{from_idle:.1f}",
    "free host, ms": "{free_host:.1f}",
    "bound, ms": "{bound:.1f}",
    "of bound": lambda row: f"{row['bound'] / row['step']:.2f}",
    "efficiency": lambda row: f"{row['alone'] / row['step']:.2f}",
    "exposed": lambda row: f"{100 * row['exposed'] / row['step']:.1f} %",
    "launches": "{launches:,}",
    "copies": "{copies:,}",
    "received, MB": lambda row: "" if row["received"] is None else f"{row['received']:,.0f}",
    "of all-reduce": of_all_reduce,
    "Python, ms": "{python:.1f}",
    "bound by": lambda row: "host" if row["step"] > HOST_BOUND * row["free_host"] else "devices",
}
PUBLISHED_TABLE = {
    "model": "{model}",
    "machine": "{machine}",
    "devices": "{devices}",
    "published": "{published_way}",
    "ms": "{published_milliseconds:.1f}",
    "to one\ndevice": "{published_scaling:.2f}",
    "predicted": "{predicted_way}",
    "ms, a\nprediction": "{predicted_milliseconds:.1f}",
    "to one device,\na prediction": "{predicted_scaling:.2f}",
    "predicted/\npublished": lambda row: f"{row['predicted_milliseconds'] / row['published_milliseconds']:.2f}",
    "source": "{source}",
}
COUNTS, SHORT_COUNTS = (2, 4, 8), (2,)
SHORT_WAYS = (REPLICATE, SHARDED)
EXPOSED_BAR = 0.1
WITH_PEER_KERNELS = {machine.name for machine in PEER_KERNELS}


def judged(rows: Iterable[Row]) -> list[str]:
    """Sentences about the bars.

    Those are for the exposed part of GPT-2 small by `fully_shard` on 8 x A100, and for the sharded optimizer where
    kernels read peers: it is at or below DDP, and launches at most 1.10 times what the module alone does.
    """
    rows = [*rows]
    ddp = {(row["model"], row["machine"]): row["step"] for row in rows if row["way"] == ALL_REDUCED}
    alone = {(row["model"], row["machine"]): row["launches"] for row in rows if row["way"] == ALONE}
    own = [row for row in rows if row["way"].startswith(NOT_RESHARDED) and row["machine"] in WITH_PEER_KERNELS]
    steps = {id(row): row["step"] / ddp[row["model"], row["machine"]] for row in own}
    most = max((row["launches"] / row["devices"] / alone[row["model"], row["machine"]] for row in own), default=0)
    above = [
        f"{row['way']}, {row['model']}, {row['machine']}: {steps[id(row)]:.2f}" for row in own if steps[id(row)] > 1
    ]
    notes = [
        f"Of {len(own)} rows of the sharded optimizer where kernels read peers, {len(own) - len(above)} are at most as "
        f"long as DDP's step. It launches at most {most:.2f} times what the module alone does on each device."
        + (f" The others, beside DDP's step: {'; '.join(above)}." if above else "")
    ] * bool(own)
    return notes + [
        f"{row['way']}, {row['model']}, {row['devices']} devices of {row['machine']}: gathers and sums are exposed for "
        f"{row['exposed'] / row['step']:.1%} of the step; at most {EXPOSED_BAR:.0%}: "
        f"{'yes' if row['exposed'] <= EXPOSED_BAR * row['step'] else 'no'}."
        for row in rows
        if (row["way"], row["model"], row["machine"]) == (SHARDED, GPT2_SMALL.name, A100.name)
    ]


def beside_published(figures: Sequence[Published], rows: Iterable[Row]) -> list[Row]:
    """A row for each of ``figures``, all of which have been predicted."""
    predicted = {(row["model"], row["machine"], row["devices"], row["way"]): row for row in rows}
    one = {(figure.shape, figure.machine): figure.milliseconds for figure in figures if figure.way == ONE}
    beside = []
    for figure in figures:
        way, alone = PREDICTED_BY[figure.way], one.get((figure.shape, figure.machine))
        found = predicted[figure.shape.name, figure.machine, figure.devices, way]
        beside.append(
            {
                "model": figure.shape.name,
                "machine": figure.machine,
                "devices": figure.devices,
                "published_way": figure.way,
                "published_milliseconds": figure.milliseconds,
                "published_scaling": None if alone is None else figure.milliseconds / alone,
                "predicted_way": way,
                "predicted_milliseconds": found["step"],
                "predicted_scaling": found["step"] / found["alone"],
                "source": figure.source,
            }
        )
    return beside


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes leave pictures."""
    return tmp_path_factory.mktemp("timelines")


@pytest.fixture(scope="module")
def report(reports: list[Report], folder: Path, short: bool) -> Report:
    """Its picture is that of one step, which a short run does not draw."""

    def copy_picture(rows: Sequence[Row], path: Path) -> None:
        shutil.copyfile(folder / "step.png", path)

    reports.append(Report("timelines", CAPTION, TABLE, None if short else copy_picture))
    return reports[-1]


@pytest.fixture(scope="module")
def published(reports: list[Report]) -> Report:
    reports.append(Report("timelines_published", PUBLISHED_CAPTION, PUBLISHED_TABLE))
    return reports[-1]


@pytest.fixture(scope="module")
def predicted(folder: Path, short: bool) -> Iterator[Callable[[RealShape], list[Row]]]:
    """The predictions of a model. Skips the test where devices cannot be simulated.

    Two processes run at a time, which disturb nothing: Python between launches is measured in CPU time.
    """
    asked = ([GPT_768], SHORT_COUNTS, SHORT_WAYS) if short else ([*REAL_SHAPES, *PUBLISHED_SHAPES], COUNTS, ())
    shapes, counts, ways = asked
    with ThreadPoolExecutor(2) as pool:
        found = {
            shape: pool.submit(printed_by, "timelines", shape.name, ",".join(map(str, counts)), folder, *ways)
            for shape in dict.fromkeys(shapes)
        }
        yield lambda shape: found[shape].result()["predictions"]
        for future in found.values():
            future.cancel()


@pytest.mark.parametrize("shape", REAL_SHAPES, ids=lambda shape: shape.name)
def test_predictions(
    shape: RealShape, report: Report, predicted: Callable[[RealShape], list[Row]], short: bool
) -> None:
    if short and shape is not GPT_768:
        pytest.skip("short")
    rows = predicted(shape)
    report.rows += rows
    report.notes += judged(rows)


@pytest.mark.parametrize("shape", PUBLISHED_SHAPES, ids=lambda shape: shape.name)
def test_beside_published_figures(
    shape: RealShape, published: Report, predicted: Callable[[RealShape], list[Row]], short: bool
) -> None:
    if short:
        pytest.skip("short")
    own = [figure for figure in PUBLISHED if figure.shape == shape]
    published.rows += beside_published(own, predicted(shape))


MEGA = 1e6


def machine(name: str, devices: int) -> Machine:
    """A megabyte takes 1 ms on any way, a million FLOPs take 1 ms, nothing else takes any time."""
    return Machine(
        name=name,
        devices=devices,
        flops={"float32": 1e9},
        memory_bandwidth=math.inf,
        kernel_latency=0.0,
        wiring=switch(devices, bandwidth=1e9, latency=0.0, host_bandwidth=1e9, host_latency=0.0),
        host=Host.free(),
    )


MACHINE = machine("two", 2)
SLOW_HOST = MACHINE.with_(host=Host(lock=0.002, rest=0.001, backward=0.0))


def work(index: int, device: int, size: float, copy: tuple[int, int] | None = None, *waits: int) -> Launch:
    """A million FLOPs for each of ``size``, or a copy of so many megabytes, after 4 ms of Python."""
    amount = {"flops" if copy is None else "bytes_written": round(size * MEGA)}
    return launch(index, "aten::mm", stream=device, copy=copy, waits=waits, host_seconds=0.004, **amount)


def twice(*step: Launch) -> Recorded:
    """A step, and two in a row."""
    again = [
        replace(one, index=one.index + len(step), waits=tuple(other + len(step) for other in one.waits)) for one in step
    ]
    streams = tuple(StreamName(device, 0) for device in range(2))
    return Recorded(Recording(streams, step), Recording(streams, (*step, *again)))


# 1 ms for the inputs, 4 to compute.
ALONE_STEP = twice(work(0, 0, 1, (HOST, 0)), work(1, 0, 4))

# The same on both devices, then 3 ms for the gradients of device 1, and device 0 adds for 1 ms.
BOTH = twice(
    work(0, 0, 1, (HOST, 0)),
    work(1, 1, 1, (HOST, 1)),
    work(2, 0, 4),
    work(3, 1, 4),
    work(4, 1, 3, (1, 0)),
    work(5, 0, 1, None, 4),
)


class TestPrediction:
    def test_of_the_module_alone(self) -> None:
        found = predict("model", ALONE, 1, ALONE_STEP, ALONE_STEP, MACHINE)
        assert (found["step"], found["from_idle"], found["alone"]) == pytest.approx((5, 5, 5))
        assert (found["bound"], found["exposed"]) == pytest.approx((4, 1))

    def test_of_two_devices(self) -> None:
        found = predict("model", REPLICATE, 2, BOTH, ALONE_STEP, MACHINE)
        assert found["from_idle"] == pytest.approx(1 + 4 + 3 + 1)
        # Device 1 begins its second step while device 0 adds, and a step of device 1 takes 8 ms.
        assert found["step"] == pytest.approx(8)
        assert found["exposed"] == pytest.approx(8 - 5)
        assert (found["launches"], found["copies"]) == (6, 3)
        assert found["received"] == pytest.approx(3)  # by device 0; inputs come from the host

    def test_of_a_slow_host(self) -> None:
        """Python's time is scaled so that it fits the module alone."""
        found = predict("model", REPLICATE, 2, BOTH, ALONE_STEP, SLOW_HOST)
        assert (found["step"], found["free_host"], found["bound"]) == pytest.approx((6 * 3, 8, 4))
        assert (found["factor"], found["python"]) == pytest.approx((3 / 4, 6 * 3))

    def test_engine_threads_are_not_python(self) -> None:
        backward = [replace(one, in_backward=one.index > 3, thread=int(one.index > 3)) for one in BOTH.one.launches]
        found = predict("model", REPLICATE, 2, twice(*backward), ALONE_STEP, SLOW_HOST)
        assert found["python"] == pytest.approx(4 * 3)

    def test_processes_and_slower_kernels_have_rows_of_their_own(self) -> None:
        """Device 0 pulls 3 MB from device 1 by a kernel."""
        pull = launch(0, "copy_many", peers=((1, 0, 3 * 10**6),))
        step = work(0, 0, 1), replace(work(1, 0, 2), in_backward=True), work(2, 0, 1)
        alone = Alone(twice(*step), [Arrival(2, 10**6)], [Unit(10**6, 1, None, 2)])
        found = predictions("model", alone, {(NOT_RESHARDED, 2): twice(pull)}, MACHINE)
        assert [(row["way"], row["devices"]) for row in found] == [
            (ALONE, 1),
            (NOT_RESHARDED, 2),
            (NOT_RESHARDED + SLOWER, 2),
            (ALL_REDUCED, 2),
            (FSDP2, 2),
        ]
        assert [row["from_idle"] for row in found[1:3]] == pytest.approx([3, 3 / 0.7])
        assert [row["received"] for row in found[1:]] == pytest.approx([3, 3, None, None])

    def test_machines_are_asked_for_the_devices_that_they_have(self) -> None:
        ways = (REPLICATE, SHARDED)
        assert asked(GPT_768, (2, 4, 8), ways, RTX_3090) == [(REPLICATE, 4), (SHARDED, 4)]
        assert asked(GPT_768, (2, 4), ways, A100) == [(REPLICATE, 2), (REPLICATE, 4), (SHARDED, 4)]


ALONE_ROW = predict(RESNET50.name, ALONE, 1, ALONE_STEP, ALONE_STEP, MACHINE)
ROWS = [
    {**ALONE_ROW, "machine": "8 x V100", "way": way, "devices": devices, "step": step, "alone": 100.0}
    for way, devices, step in ((ALONE, 1, 100.0), (TORCH, 2, 200.0), (REPLICATE, 2, 125.0))
]
"""For ResNet-50 on two devices of 8 x V100: alone 100 ms, torch's 200, replicate 125."""


class TestRows:
    def test_received_bytes_stand_beside_an_all_reduce(self) -> None:
        assert of_all_reduce(ALONE_ROW) == ""
        gradients = 4 * RESNET50.parameters / MEGA
        assert of_all_reduce({**ALONE_ROW, "devices": 2, "received": gradients}) == "1.00"
        assert of_all_reduce({**ALONE_ROW, "devices": 4, "received": gradients}) == "0.67"

    def test_the_exposed_part_of_a_sharded_step_is_judged(self) -> None:
        names = {"way": SHARDED, "model": GPT2_SMALL.name, "machine": A100.name}
        sharded = {**ALONE_ROW, **names, "step": 100.0, "exposed": 10.0}
        (within,) = judged([*ROWS, sharded])
        (beyond,) = judged([{**sharded, "exposed": 10.1}])
        assert within.endswith("for 10.0% of the step; at most 10%: yes.")
        assert beyond.endswith(": no.")

    def test_ddp_stands_beside_replicate(self) -> None:
        figures = [
            Published(RESNET50, "8 x V100", 1, ONE, 50, "pytorch"),
            Published(RESNET50, "8 x V100", 2, DDP, 60, "pytorch"),
            Published(RESNET50, "8 x V100", 2, DP, 90, "pytorch"),
        ]
        found = beside_published(figures, ROWS)
        assert [row["predicted_milliseconds"] for row in found] == [100, 125, 200]
        assert [row["published_scaling"] for row in found] == pytest.approx([1, 1.2, 1.8])
        assert [row["predicted_scaling"] for row in found] == pytest.approx([1, 1.25, 2])
        assert beside_published(figures[2:], ROWS)[0]["published_scaling"] is None
