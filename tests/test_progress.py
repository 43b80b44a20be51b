"""What takes long draws a line on a terminal, which is gone at the end; elsewhere nothing is written.

Each case names a function of the library that the work calls, a private one mostly: a test lets it fail.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from dataparallel import progress
from dataparallel.comm import peers
from dataparallel.composable import fully_shard
from dataparallel.forms import full_state, fully_shard_state
from dataparallel.sharded import ShardedTensor, distribute
from processes import run_script
from terminals import Terminal, wait_until

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6))


def failed_pairs(slots: list) -> list:
    return peers.failed_pairs([torch.device(slot) for slot in slots])


def sharded(slots: list) -> nn.Module:
    return fully_shard(Net(), devices=slots)


def prepare_loading(slots: list) -> Callable[[], Any]:
    net, state = sharded(slots), Net().state_dict()
    return lambda: fully_shard.load_full_state_dict(net, state)


def prepare_distributing(slots: list) -> Callable[[], Any]:
    net, state = sharded(slots), Net().state_dict()
    return lambda: set_model_state_dict(net, state, options=StateDictOptions(full_state_dict=True))


class Case(NamedTuple):
    """``prepare`` takes the slots and returns the work."""

    text: str
    prepare: Callable[[list], Callable[[], Any]]
    place: Any
    called: str


CASES = [
    Case("checking copies between devices", lambda slots: partial(failed_pairs, slots), peers, "_copy"),
    Case("sharding Net", lambda slots: lambda: sharded(slots), fully_shard_state, "_shard_parameter"),
    Case(
        "copying the state of Net to host memory",
        lambda slots: partial(fully_shard.full_state_dict, sharded(slots)),
        full_state,
        "full_copy",
    ),
    Case("loading the state of Net", prepare_loading, full_state, "_give_memory"),
    Case(
        "gathering the full state",
        lambda slots: partial(get_model_state_dict, sharded(slots), options=FULL),
        ShardedTensor,
        "full_tensor",
    ),
    Case("sharding the full state", prepare_distributing, distribute, "divided_on_owners_of"),
]


@pytest.fixture(
    params=[
        # Between CPU slots there is nothing to check.
        pytest.param(case, id=case.text, marks=[pytest.mark.devices("sim", "cuda")] if case.place is peers else [])
        for case in CASES
    ]
)
def case(request: pytest.FixtureRequest, slots: list, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    case = request.param
    failed_pairs(slots)  # otherwise others may draw a line for this too
    if case.place is peers:
        monkeypatch.delenv("DATAPARALLEL_PEER_CHECK", raising=False)
        monkeypatch.setattr(torch.get_device_module(), "copies_cannot_fail", False, raising=False)
        peers.forget()
    yield case
    peers.forget()


@pytest.fixture
def work(case: Case, slots: list, terminal: Terminal) -> Callable[[], Any]:
    work = case.prepare(slots)
    terminal.seek(0)
    terminal.truncate()
    return work


def threads_that_draw() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, progress._Line)]


def test_a_terminal_shows_it_until_it_is_done(case: Case, work: Callable[[], Any], terminal: Terminal) -> None:
    work()
    assert case.text in terminal.getvalue()
    assert terminal.on_screen() == ""
    assert threads_that_draw() == []


def test_the_line_of_work_that_fails_is_gone(
    case: Case, work: Callable[[], Any], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(case.place, case.called, fail)
    with pytest.raises(ZeroDivisionError):
        work()
    assert case.text in terminal.getvalue()
    assert terminal.on_screen() == ""
    assert threads_that_draw() == []


def test_without_a_terminal_not_a_byte_is_written(work: Callable[[], Any], terminal: Terminal) -> None:
    terminal.is_terminal = False
    work()
    assert terminal.getvalue() == ""


def test_without_stderr_it_runs(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.sys, "stderr", None)
    work()


# ---- the line itself -------------------------------------------------------------------------------------------------


@pytest.mark.devices("cpu")
class TestTheLine:
    def test_what_is_done_soon_draws_none(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        """And its end does not wait until the line would have been drawn."""
        monkeypatch.setattr(progress._Line, "start", threading.Thread.start)
        monkeypatch.setattr(progress, "SECONDS_BEFORE", 3600)
        with progress.progress("packing", 1) as step:
            step()
        assert terminal.getvalue() == ""

    def test_it_counts_steps_and_leaves_nothing_behind(self, terminal: Terminal) -> None:
        threads = threading.enumerate()
        with progress.progress("packing", 4) as step:
            step()
            step()
            wait_until(lambda: "packing:  50%" in terminal.getvalue() and "2/4" in terminal.getvalue())
        assert terminal.on_screen() == ""
        assert threading.enumerate() == threads

    def test_without_steps_it_has_the_time(self, terminal: Terminal) -> None:
        with progress.progress("packing"):
            wait_until(lambda: "packing [00:01]" in terminal.getvalue())

    @pytest.mark.long
    def test_tqdms_variable_turns_it_off(self) -> None:
        script = """
import sys, time
from dataparallel import progress
from terminals import Terminal
progress.SECONDS_BEFORE = 0
sys.stderr = terminal = Terminal()
with progress.progress("packing"):
    while not hasattr(sys.modules.get("tqdm"), "tqdm"):
        time.sleep(0.01)
print(repr(terminal.getvalue()))
"""
        assert run_script(script, TQDM_DISABLE="1") == "''\n"
        assert "packing" in run_script(script, TQDM_DISABLE="")
