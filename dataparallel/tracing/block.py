"""`trace`: a block around torch's profiler, which prints where the time went, and saves the profile for Perfetto."""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from dataparallel import _torch, profiling
from dataparallel.comm.streams.current import DeviceClock, Marks, current_streams
from dataparallel.devices import CPU, are_initialized
from dataparallel.forks import in_forked_child
from dataparallel.tracing.rows import Ran, Row, rows_of, text_of
from dataparallel.user_warnings import warn_user

_running = threading.Lock()  # held by the trace that runs

_KERNELS = frozenset({"CUDA", "XPU"})
"""Activities by which the profiler records kernels. Those of other backends are a matter of their own profilers."""


class Trace:
    """The context that `dataparallel.trace` returns. ``str(trace)`` is the table. Until the block has ended, there is
    none, and reading an attribute raises ``AttributeError``.

    Attributes:
        seconds: the time of the block.
        behind: for how long the host then waited for devices.
        rows: a `Row <dataparallel.tracing.rows.Row>` for each stage, and one for each replica in it.
        advice: sentences that say what to try.
        profile: the profile of torch, with all operators.
    """

    seconds: float
    behind: float
    rows: list[Row]
    advice: list[str]
    profile: profile

    def __init__(self, path: str | os.PathLike[str] | None = None, *, prints: bool = True) -> None:
        self._path, self._prints, self._table = path, prints, "the block of the trace has not ended"
        self._profile: profile | None = None
        self._clock, self._ran = DeviceClock(), list[tuple[int, torch.device, float, tuple[Marks, Marks]]]()

    def __enter__(self) -> Trace:
        """Only one trace or profiler of torch runs in a process, and a trace has one block."""
        if self._profile is not None:
            raise RuntimeError("a trace is for one block: call dataparallel.trace() again for another one")
        if not _running.acquire(blocking=False):
            raise RuntimeError(
                "a trace runs in this process already, and it records the calls of all threads: end its block before "
                "another one begins"
            )
        try:
            if _torch.is_profiler_enabled():
                raise RuntimeError(
                    "a profiler of torch runs already, and torch allows one at a time: end it before the trace begins, "
                    "or leave the trace out, because the profile has the library's ranges too"
                )
            # To ask for kernels touches devices, and the program may still choose which it sees.
            kernels = {each for each in supported_activities() if each.name in _KERNELS} if are_initialized() else set()
            options = _torch.profiler_of_all_threads()
            self._profile = profile(activities={ProfilerActivity.CPU, *kernels}, experimental_config=options)
            self._profile.__enter__()
        except BaseException:
            _running.release()
            raise
        profiling.around_replica = self._around_replica
        self._begin = time.perf_counter()
        return self

    def _around_replica(self, slot: int, device: torch.device, waiting: float, call: profiling.Call) -> Any:
        streams = current_streams([device])
        before = self._clock.marks(streams)
        output = call()
        self._ran.append((slot, device, waiting, (before, self._clock.marks(streams))))  # atomic, for several threads
        return output

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._begin
        profiling.around_replica = None
        try:
            self._end(has_failed=error is not None)
        except Exception as failure:
            if error is None:
                raise
            warn_user(f"the block has raised an error, and its trace is lost: {type(failure).__name__}: {failure}")
        finally:
            _running.release()

    def _end(self, has_failed: bool) -> None:
        """Ends the profile and makes the table. If the block has failed, a device may have, so none is waited for."""
        assert self._profile is not None
        begin, ran, self.profile = time.perf_counter(), [*self._ran], self._profile
        devices = set() if has_failed else {device for _, device, *_ in ran} - {CPU}
        try:
            for device in devices:
                torch.accelerator.synchronize(device)
            self.behind = time.perf_counter() - begin if devices else 0.0
        finally:
            was_running = _torch.is_profiler_enabled()
            with nullcontext() if was_running else suppress(RuntimeError):  # torch 2.11 raises where none runs
                self.profile.__exit__(None, None, None)
        if not was_running:
            raise RuntimeError(
                "a profile of torch that began inside of this block has ended the trace, because torch allows one at a "
                "time: let only one of the two run"
            )
        seconds = [None if has_failed else next(iter(self._clock.seconds(*marks).values()), None) for *_, marks in ran]
        replicas = [Ran(slot, on, waited, took) for (slot, on, waited, _), took in zip(ran, seconds, strict=True)]
        self.rows = rows_of(self.profile.events(), self.seconds, replicas)
        self.advice = what_to_try(self.rows, self.seconds, self.behind)
        self._table = text_of(self.rows, self.seconds, self.behind, self.advice)
        if self._prints:
            print(self)
        if self._path is not None:
            self.profile.export_chrome_trace(os.fspath(self._path))

    def __str__(self) -> str:
        return self._table


_TO_TRY = {
    "none": "no stage ran in the block: call the wrapped module in it, on several slots",
    "scatter": "pinned batches that are sent ahead: for batch in dataparallel.prefetch(loader, model)",
    "replicate": "replicas that stay: composable.replicate(model); to serve: with model.options.frozen()",
    "forward": "the model is what costs: torch.compile, torch.autocast",
    "gather": "compute the loss in forward: each replica returns a number instead of its outputs",
    "backward": "compute the loss in forward, on all devices; if it is there: torch.compile, torch.autocast",
    "sums": "sum less often: several passes of backward in set_requires_gradient_sync(False)",
    "unshard": "fewer and larger units; reshard_after_forward=False where there is memory",
    "optimizer": "foreach=True or fused=True; composable.fully_shard divides the step among devices",
    "your code": "compute the loss in forward, read .item() seldom, load by dataparallel.prefetch(loader, model)",
}


def what_to_try(rows: list[Row], seconds: float, behind: float) -> list[str]:
    """Sentences for a block that took so many ``seconds``, and devices that went on ``behind`` it."""
    shares = {row.stage: row.host / seconds for row in rows if row.replica is None}
    replicas = [row for row in rows if row.stage == "forward" and row.replica is not None]
    on_host = [row.host for row in replicas]
    on_devices = [row.host if row.device is None else row.device for row in replicas]
    largest = max(shares, key=lambda stage: shares[stage]) if len(shares) > 1 else "none"
    found = [_TO_TRY.get(largest, "see the profile")]
    # Between two events there are gaps, so only kernels tell for how long a device has computed.
    has_kernels = any(row.device is not None for row in rows if row.stage != "forward")
    if has_kernels and sum(on_devices) < 0.5 * sum(on_host):
        found.append("launch less: DataParallel(model, compile=True), graphs=True, or larger chunks")
    uneven, slowest = max(map(_slowest, (on_devices, on_host)))  # the device may be what is slow, or the host
    if uneven > 1.5 and shares["forward"] > 0.2:
        what = "smaller chunk_sizes=, or samples sorted by length"
        found.append(f"replica {replicas[slowest].replica} is slow, {uneven:.1f} times the mean: {what}")
    if behind > 0.1 * seconds:
        found.append("devices go on when the host is done: torch.compile and torch.autocast make kernels faster")
    return found


def _slowest(times: list[float]) -> tuple[float, int]:
    """How many times the mean the longest time is, and its position."""
    if not sum(times):
        return 0.0, 0
    longest = max(times)
    return len(times) * longest / sum(times), times.index(longest)


def trace(path: str | os.PathLike[str] | None = None) -> Trace:
    """Records a few steps with torch's profiler, and prints where their time went: ``with dataparallel.trace(): ...``.

    The table has a row for each stage and for each replica in it: time of the host, of the device, and how long a
    replica that was called waited for its turn. Below it are sentences that say what to try. The calls of all wrappers
    and forms in all threads are in it. Let the steps before settle what is done once: compilers, allocators.

    :doc:`/guide/tracing` says what the times are. When the block ends, the host waits for the devices that have run
    replicas. If the block raises, its error passes as it is, and the table shows what was seen until then.

    Args:
        path: a file for the profile, which https://ui.perfetto.dev shows: ``"step.json"``, or ``"step.json.gz"``.

    Returns:
        A context. ``with dataparallel.trace() as trace:`` has the figures afterwards: ``trace.rows``,
        ``trace.advice``, and torch's own profile, ``trace.profile``.

    Raises:
        FileNotFoundError: there is no folder for ``path``.
    """
    if path is not None and not (folder := Path(path).parent).is_dir():
        raise FileNotFoundError(f"trace({os.fspath(path)!r}): there is no folder {str(folder)!r}; make it before")
    return Trace(path)


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A trace belongs to the process that began it."""
    global _running
    _running = threading.Lock()
