"""The tables have every figure once. The last line names the largest cost and says what to try, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dataparallel.tracing.results import REST, STAGES, DeviceMemory, Results, Sent, Slot, Stage
from dataparallel.tracing.table import advice, text_of

pytestmark = pytest.mark.devices("cpu")  # no device takes part

ONE, OTHER = torch.device("meta", 0), torch.device("meta", 1)

FOUND_STAGES = [
    Stage("forward", 4, 0.060, 0.020, 0.010, 0.1, 0.1),
    Stage("backward", 4, 0.030, 0.025, 0.0, 0.0, 0.0),
    Stage(REST, 0, 0.010, None, None, 0.0, 0.0),
]
SLOTS = [
    Slot(0, ONE, 4, 0.050, 0.030, 0.001, 0.002, 0.003, 0.045, 0.040, 0.027),
    Slot(1, OTHER, 4, 0.055, 0.031, 0.004, None, 0.005, 0.050, None, None),
]
FOUND = Results(
    seconds=0.1, behind=0.0, steps=4, stages=FOUND_STAGES, slots=SLOTS, imbalance=1.05,
    sent=[Sent("sums", "chain", 8, 4_000_000, (ONE, OTHER))], memory=[DeviceMemory(ONE, (0, 2), 2**20, 2**21, 2**22)],
    modules={"GPT": 4}, forms=["replicate"], records=123,
)  # fmt: skip
NOTHING = Results(0.1, 0.0, 0, [Stage(REST, 0, 0.1, None, None, 0.0, 0.0)], [], 1.0, [], [], {}, [], 0)


def cells(text: str, first: str) -> list[str]:
    """The line that begins with this word."""
    return next(line.split() for line in text.splitlines() if line.startswith(first))


def test_stages_and_their_sum() -> None:
    text = text_of(FOUND, 0.0012)
    assert text.startswith("100.00 ms, 4 steps of 25.00 ms; calls: 4 of GPT, by replicate\n")
    assert cells(text, "forward") == ["forward", "4", "60.00", "60.0", "15.00", "20.00", "10.00", "100.00"]
    assert cells(text, REST)[2:] == ["10.00", "10.0", "2.50"]
    assert cells(text, "all") == ["all", "100.00", "100.0", "25.00"]


def test_slots() -> None:
    text = text_of(FOUND, 0.0)
    assert cells(text, "0 ") == ["0", "meta:0", "4", "50.00", "30.00", "1.00", "2.00", "3.00", "40.00", "27.00"]
    assert cells(text, "1 ") == ["1", "meta:1", "4", "55.00", "31.00", "4.00", "?", "5.00"]
    assert "1.05 times the mean" in text
    assert "no permit for 5.00 ms, and waited for Python's lock for 8.00 ms at most" in text


def test_bytes_and_memory() -> None:
    text = text_of(FOUND, 0.0)
    assert cells(text, "sums ") == ["sums", "chain", "2.0", "1,000,000", "meta:0", "and", "meta:1"]
    assert cells(text, "meta:0 ") == ["meta:0", "0", "2", "1.0", "2.0", "4.0"]


def test_what_it_cost_and_the_advice_are_the_end() -> None:
    *_, cost, _, last = text_of(FOUND, 0.0012).splitlines()
    assert cost == "Recording took about 1.2 ms of this, for 123 records in all threads."
    assert last == advice(FOUND)


def test_nothing_happened() -> None:
    text = text_of(NOTHING, 0.0)
    assert "No replica ran" in text
    assert "Nothing was sent between devices." in text
    assert "Memory: no figure." in text


def test_columns_are_aligned() -> None:
    lines = text_of(FOUND, 0.0).splitlines()
    head = next(line for line in lines if line.startswith("stage "))
    row = next(line for line in lines if line.startswith("backward"))
    assert head.index(" ms ") + 3 == row.index("30.00") + 5


def test_devices_that_went_on() -> None:
    assert "more for the devices" not in text_of(FOUND, 0.0)
    assert "the host waited 50.00 ms more for the devices" in text_of(replace(FOUND, behind=0.05), 0.0)


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
    assert "model.options.frozen()" in advice(serving)


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
