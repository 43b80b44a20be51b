"""A rank has fewer batches than others: these raise within the group's timeout, and their errors name who waits."""

from __future__ import annotations

import re
import time

import pytest
import torch

from dataparallel.machines.errors import PeerGone
from machine_ranks import on_mortal_machines
from machine_steps import FORMS, trained

GROUP_TIMEOUT = 5.0
FEWER, MORE = 2, 4


def train_unevenly(rank: int, devices: list[torch.device], form: str, idle: float) -> tuple[float, str] | None:
    """Rank 1 ends after fewer steps, at once or after it has been idle. What the others raise, and after how long."""
    if rank == 1:
        trained(form, rank, devices, FEWER)
        time.sleep(idle)
        return None
    began = time.monotonic()

    def note(model: object) -> None:
        nonlocal began
        began = time.monotonic()

    with pytest.raises(PeerGone) as raised:
        trained(form, rank, devices, MORE, before=note)
    return time.monotonic() - began, str(raised.value)


def check(form: str, idle: float, ranks: int) -> None:
    ended = on_mortal_machines(train_unevenly, form, idle, ranks=ranks, slots=2, group_timeout=GROUP_TIMEOUT)
    assert ended[1].error is None
    for rank in {*range(ranks)} - {1}:
        assert ended[rank].error is None, ended[rank].error
        seconds, text = ended[rank].result
        assert seconds < GROUP_TIMEOUT + 5 + 3, text  # three seconds for the steps before
        assert re.search(f"rank {rank} has waited for .* of '", text), text
        assert "do not run the same number of steps" in text
        assert re.search(r"No word from ranks? 1\.", text), text
        for other in {*range(ranks)} - {1, rank}:
            assert re.search(f"rank {other} (for|has waited for) .* of '", text), text


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_ends(form: str) -> None:
    check(form, 0, 2)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_one_of_three_ends(form: str) -> None:
    check(form, 0, 3)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_is_idle(form: str, ranks: int) -> None:
    check(form, GROUP_TIMEOUT + 8, ranks)
