"""Figures of a profile, made by hand: what lies inside of what, and whose kernels are whose."""

from __future__ import annotations

from types import SimpleNamespace as Fields
from typing import Any

import pytest
import torch

from dataparallel.devices import CPU
from dataparallel.tracing.block import what_to_try
from dataparallel.tracing.rows import REST, Ran, Row, rows_of, text_of

pytestmark = pytest.mark.devices("cpu")  # none takes part

NODE = "autograd::engine::evaluate_function: "


def event(name: str, start: float, end: float, around: Any = None, thread: int = 1, kernel: float = 0.0) -> Any:
    """Times are milliseconds, as those of its ``kernel``."""
    return Fields(
        name=name,
        thread=thread,
        time_range=Fields(start=1e3 * start, end=1e3 * end),
        cpu_parent=around,
        kernels=[Fields(duration=1e3 * kernel)] if kernel else [],
        is_user_annotation=not name.startswith(("aten", NODE)),
        is_async=False,
        device_type=Fields(name="CPU"),
    )


def milliseconds(rows: list[Row]) -> dict[tuple[str, int | None], tuple[float, float | None]]:
    return {
        (row.stage, row.replica): (round(1e3 * row.host, 6), None if row.device is None else round(1e3 * row.device, 6))
        for row in rows
    }


def test_a_stage_has_the_time_of_its_ranges_without_other_stages_inside() -> None:
    outer = event("dataparallel::parallel_apply", 0, 10)
    replica = event("dataparallel::replica 0", 1, 9, outer)
    events = [outer, replica, event("dataparallel::unshard 0", 2, 5, replica), event("Optimizer.step#SGD.step", 12, 15)]
    found = milliseconds(rows_of(events, 0.02, []))
    assert found == {
        ("forward", None): (7, None),
        ("forward", 0): (5, None),
        ("unshard", None): (3, None),
        ("unshard", 0): (3, None),
        ("optimizer", None): (3, None),
        (REST, None): (7, None),
    }


def test_threads_at_the_same_time_are_counted_once() -> None:
    events = [event(f"dataparallel::replica {slot}", slot, slot + 4, thread=slot) for slot in range(3)]
    found = milliseconds(rows_of(events, 0.01, []))
    assert found["forward", None] == (6, None)
    assert found["forward", 1] == (4, None)
    assert found[REST, None] == (4, None)


def test_a_thread_of_the_engine_works_for_the_replica_whose_ranges_it_has() -> None:
    first, second, both = (event(f"{NODE}OnSlotBackward", 0, 4, thread=thread) for thread in (1, 2, 3))
    events = [
        first,
        event("dataparallel::gradients 0", 1, 2, first, thread=1),
        event(f"{NODE}MulBackward", 5, 7, thread=1),
        second,
        event("dataparallel::gradients 1", 1, 3, second, thread=2),
        both,
        event("dataparallel::gradients 2", 1, 2, both, thread=3),
        event("dataparallel::gradients 3", 2, 3, both, thread=3),
    ]
    found = milliseconds(rows_of(events, 0.01, []))
    assert found["backward", 0] == (5, None)
    assert found["backward", 1] == (2, None)
    assert ("backward", 2) not in found
    assert found["backward", None] == (5, None)
    assert found["sums", 1] == (2, None)


def test_kernels_count_for_the_stage_and_the_replica_that_launched_them() -> None:
    replica, node = event("dataparallel::replica 1", 0, 2, kernel=8), event(f"{NODE}MmBackward", 3, 4, thread=2)
    mm = event("aten::linear", 0, 1, replica)
    events = [
        replica,
        mm,
        event("aten::mm", 0, 1, mm, kernel=8),
        node,
        event("dataparallel::gradients 1", 3.5, 3.6, node, thread=2),
        event("aten::mm", 3, 3.5, node, thread=2, kernel=5),
        event("aten::add", 5, 6, kernel=2),
        event(f"{NODE}MmBackward", 6, 7, thread=2, kernel=1),
    ]
    found = milliseconds(rows_of(events, 0.01, [Ran(1, torch.device("cuda", 1), 0.5, 0.25)]))
    assert found["forward", 1] == found["forward", None] == (2, 8)
    assert found["backward", 1][1] == 6
    assert found[REST, None][1] == 2


def test_without_kernels_replicas_have_the_time_of_events_on_their_devices() -> None:
    events = [event(f"dataparallel::replica {slot}", 0, 1, thread=slot) for slot in range(2)]
    ran = [Ran(slot, torch.device("cuda", slot), 0.5, 0.25) for slot in (0, 1, 1)]
    rows = {row.replica: row for row in rows_of(events, 0.01, ran) if row.stage == "forward"}
    assert [rows[slot].device for slot in (None, 0, 1)] == [0.75, 0.25, 0.5]
    assert [rows[slot].waiting for slot in (None, 0, 1)] == [1.5, 0.5, 1.0]
    assert rows[1].on == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("stage", "device", "words"),
    [
        ("gather", 0.2, "the kernels' time, added up, by the profiler"),
        ("forward", 0.2, "by events; the profile has no kernels"),
        ("forward", None, "not known, or CPU slots"),
    ],
)
def test_the_table_says_where_device_times_come_from(stage: str, device: float | None, words: str) -> None:
    text = text_of([Row(stage, None, None, 1, 0.5, device, None)], 1.0, 0.0, ["less"])
    assert words in text
    assert f"{stage} " in text
    assert text.endswith("\nto try: less")


class TestWhatToTry:
    def test_the_largest_stage_has_a_sentence(self) -> None:
        rows = [Row(stage, None, None, 1, host, None, None) for stage, host in (("forward", 0.1), ("gather", 0.6))]
        (sentence,) = what_to_try(rows, 1.0, behind=0.0)
        assert "the loss in forward" in sentence

    def test_all_else_that_costs_is_named_beside_it(self) -> None:
        replicas = [
            Row("forward", slot, CPU, 1, 0.3, device, None) for slot, device in enumerate((0.04, 0.04, 0.04, 0.2))
        ]
        rows = [Row("forward", None, None, 4, 0.6, 0.32, None), *replicas, Row(REST, None, None, 0, 0.1, 0.0, None)]
        found = what_to_try(rows, 1.0, behind=0.2)
        assert len(found) == 4
        for sentence, words in zip(found[1:], ("launch less", "replica 3 is slow, 2.5", "devices go on"), strict=True):
            assert words in sentence

    def test_a_replica_that_is_slow_on_the_host_is_named_too(self) -> None:
        replicas = [Row("forward", slot, CPU, 1, host, 0.1, None) for slot, host in enumerate((0.1, 0.1, 0.7))]
        rows = [Row("forward", None, None, 3, 0.9, 0.3, None), *replicas]
        assert any("replica 2 is slow, 2.3" in sentence for sentence in what_to_try(rows, 1.0, behind=0.0))
