"""The last line names the largest cost and says what to try, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dataparallel.tracing.results import REST, STAGES, Results, Sent, Slot, Stage
from dataparallel.tracing.table import advice

pytestmark = pytest.mark.devices("cpu")  # no device takes part

CPU = torch.device("cpu")


def slot(number: int, forward: float = 1.0, device: torch.device = CPU, **more: float) -> Slot:
    fields = {"running": forward, "no_permit": 0.0, "no_core": 0.0, "lock": 0.0, "work": forward, **more}
    return Slot(number, device, 1, forward, device_forward=None, device_backward=None, **fields)  # type: ignore[arg-type]


def block(slots: list[Slot] | None = None, forms: tuple[str, ...] = (), **seconds: float) -> Results:
    """A block of 10 seconds; what is not named is code of the user, and each named stage was called once."""
    stages = [Stage(name, 1, time, time, 0.0, 0.0, 0.0) for name, time in seconds.items()]
    stages.append(Stage(REST, 0, 10 - sum(seconds.values()), None, None, 0.0, 0.0))
    slots = [slot(0), slot(1)] if slots is None else slots
    times = [one.work for one in slots] or [1.0]
    imbalance = max(times) * len(times) / sum(times)
    return Results(10.0, 0.0, 5, stages, slots, imbalance, [], [], {"Net": 5}, forms, 9)


@pytest.mark.parametrize(
    ("stage", "name", "hints"),
    [
        ("scatter", "splitting and sending the batch", ["pinned", "prefetch"]),
        ("gather", "gathering outputs", ["loss in the module's forward"]),
        ("unshard", "gathering sharded parameters", ["larger units", "reshard_after_forward=False"]),
        ("sums", "adding up gradients", ["set_requires_gradient_sync(False)"]),
        ("optimizer", "the step of the optimizer", ["fused=True"]),
        ("backward", "the backward pass", ["torch.compile", "autocast"]),
        ("forward", "the forward passes of the replicas", ["torch.compile", "autocast"]),
        ("replicate", "making replicas", ["replicas stay"]),
        ("new", "new", ["trace.save"]),
    ],
)
def test_each_stage_can_be_the_largest_cost(stage: str, name: str, hints: list[str]) -> None:
    others = {other: 0.5 for other in {*STAGES.values()} - {stage}}
    words = advice(block(**{stage: 5.0}, **others))
    assert words.startswith(f"The largest cost is {name}: 1000.0 ms a step, 50 %.")
    assert all(hint in words for hint in hints)
    assert "\n" not in words


def test_code_of_the_user() -> None:
    words = advice(block(forward=2.0))
    assert words.startswith("The largest cost is code of your own between the stages: 1600.0 ms a step, 80 %.")
    assert ".item()" in words


def test_a_block_without_a_call() -> None:
    assert "No stage of this library ran" in advice(block(slots=[]))


def test_without_steps_it_is_the_whole_time() -> None:
    assert "backward pass: 8000.0 ms, 80 %" in advice(replace(block(backward=8.0), steps=0))


def test_replicas_that_are_made_in_each_step() -> None:
    training = block(replicate=5.0, backward=1.0, forms=("DataParallel",))
    assert "composable.replicate(model)" in advice(training)
    serving = block(replicate=5.0, forms=("DataParallel",))
    assert "model.frozen()" in advice(serving)


def test_replicas_that_wait_for_the_lock() -> None:
    words = advice(block(forward=8.0, slots=[slot(0, lock=0.1), slot(1, lock=0.6)]))
    assert "Python's lock" in words
    assert "compile=True" in words


def test_replicas_that_wait_for_a_core() -> None:
    assert "wait for a core" in advice(block(forward=8.0, slots=[slot(0, no_core=0.1), slot(1, no_core=0.6)]))


def test_replicas_on_devices_that_run_one_after_the_other() -> None:
    several = [torch.device("meta", index) for index in range(2)]
    on_devices = [slot(0, device=several[0]), slot(1, no_permit=1.0, device=several[1])]
    assert "one after the other" in advice(block(forward=8.0, slots=on_devices))
    on_the_cpu = [slot(0), slot(1, no_permit=1.0)]  # that is as it should be: they share the cores
    assert "one after the other" not in advice(block(forward=8.0, slots=on_the_cpu))


def test_a_slot_that_is_slower_than_the_others() -> None:
    """It computes half as fast, so it gets half of what each of the others gets."""
    words = advice(block(forward=8.0, slots=[slot(0), slot(1), slot(2, 2.0)]))
    assert "Slot 2 takes 1.5 times the mean" in words
    assert "chunk_sizes= in the ratio 40, 40, 20" in words


def test_another_slot_is_slower_each_time() -> None:
    words = advice(replace(block(forward=8.0), imbalance=1.6))
    assert "1.6 times the mean, and another one each time" in words


def test_sums_inside_of_backward_in_other_threads() -> None:
    found = block(backward=8.0)
    found.stages.append(Stage("sums", 0, 0.0, 0.0, 0.0, 5.0, elsewhere_running=4.0))
    assert "Sums of gradients take much of it" in advice(found)


def test_a_backward_through_gathered_outputs() -> None:
    several = [torch.device("meta", index) for index in range(2)]
    outputs = Sent("gather", "direct", 5, 50_000_000, (several[1], several[0]))
    words = advice(replace(block(backward=8.0), sent=[outputs]))
    assert "Each step gathers 10.0 MB of outputs" in words
    assert "loss in the module's forward" in words


def test_devices_that_go_on_after_the_block() -> None:
    words = advice(replace(block(forward=8.0), behind=4.0))
    assert words.startswith("The largest cost is what devices compute: they went on for 4000.0 ms")


def test_a_busy_machine_makes_times_uncertain() -> None:
    found = block(forward=8.0)
    found.stages[0] = replace(found.stages[0], no_core=5.0)
    assert "For 50 % of the block the calling thread had no core" in advice(found)
    assert "no core" not in advice(block(forward=8.0))
