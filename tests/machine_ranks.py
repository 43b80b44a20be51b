"""`on_machines`: runs a function in several processes, each with slots of its own, as the machines of one job.

The slots are of the kind of this run: CPU slots, simulated devices that each process makes for itself, or those of a
stand-in for CUDA. Where there are GPUs, they are CPU slots. `on_mortal_machines` is for tests that kill ranks.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from clocked import check_clocks
from dataparallel.machines.collectives import stage
from dataparallel.machines.group import Result
from dataparallel.machines.lanes import Lane, Machines
from dataparallel.testing.ranks import Rank, comms, on_processes
from dataparallel.testing.ranks.child import Found, find
from nogpu.cuda import is_stand_in

TIMEOUT = 60.0


def kind_of_this_run() -> str:
    """Of ``--devices``: "sim", "cuda" on a stand-in, or "cpu"."""
    return "sim" if hasattr(torch, "sim") else "cuda" if is_stand_in() else "cpu"


def on_machines(
    function: Callable[..., Any],
    /,
    *args: Any,
    ranks: int = 2,
    slots: int = 2,
    kind: str | None = None,
    timeout: float = TIMEOUT,
    group_timeout: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Calls ``function(rank, devices, *args, **kwargs)`` in each process; returns what the ranks return.

    Args:
        function: at the top of its module.
        *args: what can be pickled.
        ranks: how many processes. There is a gloo group of them.
        slots: how many devices each has.
        kind: "cpu", "sim" or "cuda"; that of this run if None.
        timeout: seconds for all.
        group_timeout: seconds of the process group; a little more than ``timeout`` if None.
        **kwargs: what can be pickled.

    Raises:
        RanksFailed: names the rank that has failed first.
    """
    __tracebackhide__ = True
    settings = Settings(find(function), slots, kind or kind_of_this_run(), group_timeout or timeout + 30)
    return on_processes(_machine, settings, args, kwargs, ranks=ranks, backend="gloo", timeout=timeout, comms=False)


def all_machines() -> Machines:
    """Those of the default group."""
    return Machines.of(distributed.group.WORLD)


def summed(lane: Lane, tensor: torch.Tensor, what: str = "a sum") -> Result:
    """Adds the sum over ranks of a tensor to the lane."""
    return lane.launch("backward", [what], [stage(lane.machines, tensor).sum], what)[0]


def word(machines: Machines, value: Any = None) -> list[Any]:
    """What all ranks say, outside of steps."""
    found: list[Any] = machines.words.gather("a word of each rank", "", value).wait()
    return found


def new_machines() -> Machines:
    """Those of a new group of all ranks, which no failure has ended."""
    return Machines.of(distributed.new_group())


def assert_over(machines: Machines, words: str) -> None:
    """Whatever is sent next raises the error that has ended the group, at once, on this rank too."""
    for lane in (machines.words, Lane(machines, "later")):
        for item in (lane.gather("a word", "", None), summed(lane, torch.ones(1)), lane.end("backward", [True])):
            began = time.monotonic()
            found = said(item.wait)
            assert time.monotonic() - began < 0.5, found
            assert words in found
            assert found.endswith("Start all processes again, from a checkpoint"), found


def said(function: Callable[..., Any], *args: Any) -> str:
    """The type and the words of the error that a call raises."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@dataclass
class Ended:
    """How a mortal rank has ended.

    Attributes:
        code: the exit code; minus the signal that has killed it.
        result: what the function has returned.
        error: what it has raised: the name of the type and the message.
        seconds: how long the function has run.
    """

    code: int
    result: Any = None
    error: tuple[str, str] | None = None
    seconds: float = 0.0


def on_mortal_machines(
    function: Callable[..., Any],
    /,
    *args: Any,
    ranks: int = 2,
    slots: int = 1,
    kind: str | None = None,
    timeout: float = TIMEOUT,
    group_timeout: float = 3.0,
    **kwargs: Any,
) -> list[Ended]:
    """As `on_machines`, for ranks that may die. The others go on; the result says how each has ended."""
    __tracebackhide__ = True
    settings = Settings(find(function), slots, kind or kind_of_this_run(), group_timeout)
    return on_processes(_mortal, settings, args, kwargs, ranks=ranks, backend="gloo", timeout=timeout, comms=False)


@dataclass
class Settings:
    """What the processes are told."""

    found: Found
    slots: int
    kind: str
    group_timeout: float


def _devices(settings: Settings) -> list[torch.device]:
    if settings.kind == "cpu":
        return [torch.device("cpu")] * settings.slots
    if settings.kind == "cuda":
        return [torch.device("cuda", slot % torch.cuda.device_count()) for slot in range(settings.slots)]
    from nogpu.simulated import simulate

    return simulate(settings.slots)


@contextmanager
def _settled(kind: str) -> Iterator[None]:
    """What the clocks find when memory is freed belongs to the function."""
    yield
    check_clocks()
    for index in range(torch.accelerator.device_count() if kind != "cpu" else 0):
        torch.accelerator.synchronize(index)


def _machine(rank: Rank, settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    devices = _devices(settings)
    assert comms.ours is not None
    comms.ours.timeout = settings.group_timeout
    distributed.set_debug_level_from_env()  # the server that has forked this process has read another environment
    with comms.ours.made(rank, "gloo"), _settled(settings.kind):
        return settings.found.load()(rank.number, devices, *args, **kwargs)


def _mortal(rank: Rank, settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ended:
    """The rank's process only watches: a child of it is the machine, and may die."""
    path = Path(tempfile.gettempdir()) / "ended"
    child = os.fork()
    if child == 0:
        try:
            path.write_bytes(pickle.dumps(_run(rank, settings, args, kwargs)))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    ended = pickle.loads(path.read_bytes()) if path.exists() else Ended(0)
    ended.code = os.waitstatus_to_exitcode(status)
    return ended


def _run(rank: Rank, settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ended:
    began = time.monotonic()
    try:
        # The engine's first threads of a forked process would race to make torch's pool of threads anew.
        torch.set_num_threads(torch.get_num_threads())
        devices = _devices(settings)
        assert comms.ours is not None
        comms.ours.timeout = settings.group_timeout
        distributed.set_debug_level_from_env()
        comms.ours.begin(rank, "gloo")
        began = time.monotonic()
        result = settings.found.load()(rank.number, devices, *args, **kwargs)
    except BaseException as error:
        traceback.print_exc()
        return Ended(0, error=(type(error).__name__, str(error)), seconds=time.monotonic() - began)
    return Ended(0, result=result, seconds=time.monotonic() - began)
