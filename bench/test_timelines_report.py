"""Predictions of recordings that are made by hand, and the rows of tables. Nothing is simulated or timed here."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from nogpu.timeline import HOST, Host, Launch, Machine, Recording, StreamName
from nogpu.timeline.presets import A100, PRESETS
from nogpu.timeline.wiring import switch
from published import DDP, DP, ONE, PUBLISHED, PUBLISHED_SHAPES, SOURCES, Published
from real_shapes import GPT2_SMALL, RESNET50
from reporting import table
from timelines import ALONE, REPLICATE, SHARDED, TORCH, Recorded, predict, predictions
from timelines_report import PREDICTED_BY, PublishedRow, Row, beside_published, judged

MEGA = 1e6

# A megabyte takes 1 ms on any way, a million FLOPs take 1 ms, nothing else takes any time.
MACHINE = Machine(
    name="two",
    devices=2,
    flops={"float32": 1e9},
    memory_bandwidth=math.inf,
    kernel_latency=0.0,
    wiring=switch(2, bandwidth=1e9, latency=0.0, host_bandwidth=1e9, host_latency=0.0),
    host=Host.free(),
)
SLOW_HOST = MACHINE.with_(host=Host(lock=0.002, rest=0.001, backward=0.0))


def launch(index: int, device: int, size: float, copy: tuple[int, int] | None = None, *waits: int) -> Launch:
    """A million FLOPs for each of ``size``, or a copy of so many megabytes, after 4 ms of Python."""
    return Launch(
        index=index,
        op="aten::mm" if copy is None else "aten::_copy_from",
        thread=0,
        in_backward=False,
        stream=device,
        bytes_read=0,
        bytes_written=0 if copy is None else round(size * MEGA),
        flops=round(size * MEGA) if copy is None else 0,
        dtype="float32",
        shapes=(),
        copy=copy,
        waits=waits,
        joins=None,
        host_waits=(),
        issued_after=(),
        host_seconds=0.004,
    )


def twice(*step: Launch) -> Recorded:
    """A step, and two in a row."""
    again = [
        replace(one, index=one.index + len(step), waits=tuple(other + len(step) for other in one.waits)) for one in step
    ]
    streams = tuple(StreamName(device, 0) for device in range(2))
    return Recorded(Recording(streams, step), Recording(streams, (*step, *again)))


# 1 ms for the inputs, 4 to compute.
ALONE_STEP = twice(launch(0, 0, 1, (HOST, 0)), launch(1, 0, 4))

# The same on both devices, then 3 ms for the gradients of device 1, and device 0 adds for 1 ms.
BOTH = twice(
    launch(0, 0, 1, (HOST, 0)),
    launch(1, 1, 1, (HOST, 1)),
    launch(2, 0, 4),
    launch(3, 1, 4),
    launch(4, 1, 3, (1, 0)),
    launch(5, 0, 1, None, 4),
)


class TestPrediction:
    def test_of_the_module_alone(self) -> None:
        found = predict("model", ALONE, 1, ALONE_STEP, ALONE_STEP, MACHINE)
        assert (found.step, found.from_idle, found.alone) == pytest.approx((5, 5, 5))
        assert (found.bound, found.exposed) == pytest.approx((4, 1))
        assert found.efficiency == pytest.approx(1)

    def test_of_two_devices(self) -> None:
        found = predict("model", REPLICATE, 2, BOTH, ALONE_STEP, MACHINE)
        assert found.from_idle == pytest.approx(1 + 4 + 3 + 1)
        # Device 1 begins its second step while device 0 adds, and a step of device 1 takes 8 ms.
        assert found.step == pytest.approx(8)
        assert found.exposed == pytest.approx(8 - 5)
        assert found.efficiency == pytest.approx(5 / 8)
        assert (found.launches, found.copies) == (6, 3)
        assert found.received == pytest.approx(3)  # by device 0; inputs come from the host

    def test_of_a_slow_host(self) -> None:
        found = predict("model", REPLICATE, 2, BOTH, ALONE_STEP, SLOW_HOST)
        assert found.step == pytest.approx(6 * 3)
        assert found.free_host == pytest.approx(8)
        assert found.bound == pytest.approx(4)
        assert found.is_host_bound

    def test_a_host_that_takes_a_tenth_more_binds_nothing(self) -> None:
        found = predict("model", REPLICATE, 2, BOTH, ALONE_STEP, MACHINE)
        assert not found.is_host_bound
        assert not replace(found, step=1.05 * found.free_host).is_host_bound
        assert replace(found, step=1.2 * found.free_host).is_host_bound

    def test_pythons_time_is_scaled_so_that_it_fits_the_module_alone(self) -> None:
        alone = predict("model", ALONE, 1, ALONE_STEP, ALONE_STEP, SLOW_HOST)
        both = predict("model", REPLICATE, 2, BOTH, ALONE_STEP, SLOW_HOST)
        assert alone.factor == both.factor == pytest.approx(3 / 4)
        assert (alone.python, both.python) == pytest.approx((2 * 3, 6 * 3))

    def test_engine_threads_are_not_python(self) -> None:
        backward = [replace(one, in_backward=one.index > 3, thread=int(one.index > 3)) for one in BOTH.one.launches]
        found = predict("model", REPLICATE, 2, twice(*backward), ALONE_STEP, SLOW_HOST)
        assert found.python == pytest.approx(4 * 3)

    def test_machines_with_fewer_devices_are_left_out(self) -> None:
        one = replace(
            SLOW_HOST,
            name="one",
            devices=1,
            wiring=switch(1, bandwidth=1e9, latency=0.0, host_bandwidth=1e9, host_latency=0.0),
        )
        streams = (StreamName(0, 0),)
        alone = Recorded(
            Recording(streams, ALONE_STEP.one.launches),
            Recording(streams, ALONE_STEP.two.launches),
        )
        found = predictions("model", alone, {(REPLICATE, 2): BOTH}, [one, MACHINE])
        assert [(each.machine, each.way, each.devices) for each in found] == [
            ("one", ALONE, 1),
            ("two", ALONE, 1),
            ("two", REPLICATE, 2),
        ]


@pytest.fixture
def rows() -> list[Row]:
    """For ResNet-50 on two devices of 8 x V100: alone 100 ms, torch's 200, replicate 125."""
    alone = predict(RESNET50.name, ALONE, 1, ALONE_STEP, ALONE_STEP, MACHINE)
    found = [
        replace(alone, machine="8 x V100", way=way, devices=devices, step=step, alone=100.0)
        for way, devices, step in ((ALONE, 1, 100.0), (TORCH, 2, 200.0), (REPLICATE, 2, 125.0))
    ]
    return [Row(**vars(each)) for each in found]


class TestRows:
    def test_a_table_and_a_csv_file_can_be_made(self, rows: list[Row]) -> None:
        assert "composable.replicate" in table([row.cells() for row in rows])
        assert all(getattr(row, column.name) is not None for row in rows for column in fields(row))

    def test_received_bytes_stand_beside_an_all_reduce(self, rows: list[Row]) -> None:
        alone, *_, two = rows
        assert alone.of_all_reduce is None
        gradients = 4 * RESNET50.parameters / MEGA
        assert replace(two, devices=2, received=gradients).of_all_reduce == pytest.approx(1)
        assert replace(two, devices=4, received=gradients).of_all_reduce == pytest.approx(2 / 3)

    def test_the_exposed_part_of_a_sharded_step_is_judged(self, rows: list[Row]) -> None:
        sharded = replace(rows[0], way=SHARDED, model=GPT2_SMALL.name, machine=A100.name, step=100.0, exposed=10.0)
        (within,) = judged([*rows, sharded])
        (beyond,) = judged([replace(sharded, exposed=10.1)])
        assert within.endswith("for 10.0% of the step; at most 10%: yes.")
        assert beyond.endswith(": no.")

    def test_ddp_stands_beside_replicate(self, rows: list[Row]) -> None:
        figures = [
            Published(RESNET50, "8 x V100", 1, ONE, 50, "pytorch"),
            Published(RESNET50, "8 x V100", 2, DDP, 60, "pytorch"),
            Published(RESNET50, "8 x V100", 2, DP, 90, "pytorch"),
        ]
        found = beside_published(figures, rows)
        assert [row.predicted_milliseconds for row in found] == [100, 125, 200]
        assert [row.published_scaling for row in found] == pytest.approx([1, 1.2, 1.8])
        assert [row.predicted_scaling for row in found] == pytest.approx([1, 1.25, 2])
        assert "1.80" in table([row.cells() for row in found])

    def test_a_scaling_that_is_not_published_stays_empty(self, rows: list[Row]) -> None:
        (found,) = beside_published([Published(RESNET50, "8 x V100", 2, DP, 90, "pytorch")], rows)
        assert found.published_scaling is None
        assert isinstance(found, PublishedRow)
        assert found.cells()["to one\ndevice"] == ""

    def test_other_models_are_left_out(self, rows: list[Row]) -> None:
        other = replace(RESNET50, name="another")
        assert beside_published([Published(other, "8 x V100", 2, DP, 90, "pytorch")], rows) == []


@pytest.mark.parametrize("figure", PUBLISHED, ids=lambda figure: f"{figure.shape.name}, {figure.way}, {figure.devices}")
def test_each_published_figure_can_be_predicted(figure: Published) -> None:
    devices = {machine.name: machine.devices for machine in PRESETS}
    assert figure.devices <= devices[figure.machine]
    assert figure.source in SOURCES
    assert figure.way in PREDICTED_BY
    assert figure.shape in PUBLISHED_SHAPES
    assert (figure.devices == 1) == (figure.way == ONE)
