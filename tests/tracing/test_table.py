"""The tables: every figure once, in columns, and the advice as the last line."""

from __future__ import annotations

import pytest
import torch

from dataparallel.tracing.results import REST, DeviceMemory, Results, Sent, Slot, Stage
from dataparallel.tracing.table import advice, text_of

pytestmark = pytest.mark.devices("cpu")  # no device takes part

ONE, OTHER = torch.device("meta", 0), torch.device("meta", 1)

STAGES = [
    Stage("forward", 4, 0.060, 0.020, 0.010, 0.1, 0.1),
    Stage("backward", 4, 0.030, 0.025, 0.0, 0.0, 0.0),
    Stage(REST, 0, 0.010, None, None, 0.0, 0.0),
]
SLOTS = [
    Slot(0, ONE, 4, 0.050, 0.030, 0.001, 0.002, 0.003, 0.045, 0.040, 0.027),
    Slot(1, OTHER, 4, 0.055, 0.031, 0.004, None, 0.005, 0.050, None, None),
]
FOUND = Results(
    seconds=0.1, behind=0.0, steps=4, stages=STAGES, slots=SLOTS, imbalance=1.05,
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
    from dataclasses import replace

    assert "more for the devices" not in text_of(FOUND, 0.0)
    assert "the host waited 50.00 ms more for the devices" in text_of(replace(FOUND, behind=0.05), 0.0)
