"""`Recorder` collects ranges, waits for permits, copies and gradients from all threads while a trace runs.

It never waits. Threads need no lock, because they only append to lists, which is one step of the interpreter. A range
that another thread ends after the block is in no result. Times are nanoseconds of ``time.perf_counter_ns``.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from io import FileIO
from typing import Any, NamedTuple, TypeVar

import torch

from dataparallel import _torch, profiling
from dataparallel.comm.streams.current import DeviceClock, Marks, current_streams
from dataparallel.forks import in_forked_child

T = TypeVar("T")

ENGINE = "autograd engine"
"""The name of threads that Python has not started: they are threads of torch."""


@dataclass(frozen=True)
class Thread:
    """A thread that has recorded something. Threads are numbered in the order of first use; the caller's is 0."""

    number: int
    name: str


@dataclass
class Span:
    """A range that has ended. ``ran``: for how long its thread has run in it.

    ``call`` is the number of the call whose replica ran, or the number of the optimizer; else -1. ``core`` is for how
    long the thread had no core, if that is known. It is not measured for a slot's ranges inside of others, which are
    many and short. ``marks`` are events on device streams at both ends, if the range is timed there.
    """

    name: str
    detail: str
    slot: int | None
    call: int
    thread: Thread
    start: int
    end: int
    ran: int
    core: int | None
    marks: tuple[Marks, Marks] | None


class Wait(NamedTuple):
    """A replica waited for a permit."""

    call: int
    slot: int
    start: int
    end: int


class Copy(NamedTuple):
    """A copy that was launched. ``stage``: the name of the range around it, "" outside of all ranges."""

    stage: str
    route: str
    number_of_bytes: int
    source: torch.device
    target: torch.device
    time: int


class Gradients(NamedTuple):
    """A bucket of gradients that was complete on a slot."""

    slot: int
    thread: Thread
    time: int


_SCHEDSTAT = "/proc/thread-self/schedstat"
_LONGEST = 96
"""Bytes. Three numbers of 64 bits are shorter."""


class ThreadClocks:
    """The clocks of the thread that makes this object: how long it has run, and how long it has waited for a core.

    No other thread may read them. On Linux the time without a core is the second of three numbers in
    ``/proc/thread-self/schedstat`` (Documentation/scheduler/sched-stats.rst in its source). Elsewhere it is unknown.

    Python's own file functions release the interpreter's lock during a call, and the thread may get it back only after
    milliseconds. So the C library's ``pread`` reads the file, through ``ctypes.PyDLL``, which keeps the lock.
    """

    def __init__(self, path: str = _SCHEDSTAT) -> None:
        self._file: FileIO | None = None
        self._read = ctypes.create_string_buffer(_LONGEST)
        try:
            self._file = FileIO(path)
            self.waited_for_core()
        except (OSError, AttributeError, IndexError, ValueError):  # no such file, no such function, or another format
            self._file = None

    def ran(self) -> int:
        """Nanoseconds for which the thread has run."""
        return time.thread_time_ns()

    def waited_for_core(self) -> int | None:
        """Nanoseconds in which the thread could run and had no core; ``None`` if the system does not tell."""
        if self._file is None:
            return None
        _pread()(self._file.fileno(), self._read, _LONGEST, 0)
        return int(self._read.value.split()[1])


@cache
def _pread() -> Callable[..., int]:
    found = ctypes.PyDLL(None).pread
    found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long)
    found.restype = ctypes.c_ssize_t
    return found


class _ThreadState(threading.local):
    """The state of one thread in one recorder."""

    def __init__(self, made: Callable[[], Thread]) -> None:
        self.thread = made()
        self.clocks = ThreadClocks()
        self.open: list[str] = []
        self.optimizers: dict[int, _Range] = {}  # by the optimizer's id: the step that has begun


class Recorder:
    """All records of a trace. ``devices``: for each slot that has run its device."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        self.copies: list[Copy] = []
        self.marks: list[Gradients] = []
        self.devices: dict[int, torch.device] = {}
        self.clock = DeviceClock()
        self._optimizers: dict[int, int] = {}
        self._numbers, self._calls, self._optimizer_numbers = itertools.count(), itertools.count(), itertools.count()
        self._thread_state = _ThreadState(self._new_thread)
        self.caller = self._thread_state.thread

    def _new_thread(self) -> Thread:
        ident = threading.get_ident()
        thread = next((thread for thread in threading.enumerate() if thread.ident == ident), None)
        # Python makes a thread object with such a name when code in a thread of torch asks for the current thread.
        if thread is None or thread.name.startswith("Dummy-"):
            return Thread(next(self._numbers), ENGINE)
        return Thread(next(self._numbers), thread.name)

    # ---- called through `profiling` ----------------------------------------------------------------------------------

    def stage(
        self, name: str, detail: str = "", slot: int | None = None, profiled: AbstractContextManager[Any] | None = None
    ) -> _Range:
        """A context that records the range of a stage, with ``profiled`` inside."""
        return _Range(self, self._thread_state, name, detail, slot, profiled=profiled)

    def replicas(self, module: str, devices: list[torch.device]) -> _Replicas:
        """Makes the recorder of the replicas of one call. ``module`` is the name of the module's class."""
        self.devices.update(enumerate(devices))
        return _Replicas(self, next(self._calls), module, devices)

    def sent(self, route: str, number_of_bytes: int, source: torch.device, target: torch.device) -> None:
        """Records that a copy between devices has been launched."""
        now, ranges = time.perf_counter_ns(), self._thread_state.open
        # In a thread of the engine most copies are in no range: the copies of gather's backward, for example.
        stage = ranges[-1] if ranges else "backward" if _torch.is_in_backward() else ""
        self.copies.append(Copy(stage, route, number_of_bytes, source, target, now))

    def gradients(self, slot: int) -> None:
        """Records that a bucket of gradients is complete on a slot."""
        self.marks.append(Gradients(slot, self._thread_state.thread, time.perf_counter_ns()))

    # ---- called by `block` -------------------------------------------------------------------------------------------

    def until_now(self) -> Recorder:
        """A recorder with what has been recorded so far. Other threads may go on with this one."""
        found = copy.copy(self)
        found.spans, found.waits = [*self.spans], [*self.waits]
        found.copies, found.marks = [*self.copies], [*self.marks]
        found.devices = self.devices.copy()
        return found

    def backward(self) -> AbstractContextManager[Any]:
        """A context that records the range of a call of the autograd engine, also on the devices of all slots."""
        devices = list(self.devices.values())  # in one step: other threads add slots
        return _Range(self, self._thread_state, "backward", streams=current_streams(devices))

    def optimizer_begins(self, optimizer: object) -> None:
        """Begins the range of an optimizer's step. If the step fails, no hook runs, and the range is dropped."""
        number = self._optimizers.setdefault(id(optimizer), next(self._optimizer_numbers))
        begun = _Range(self, self._thread_state, "optimizer", type(optimizer).__name__, call=number)
        self._thread_state.optimizers[id(optimizer)] = begun.begin()

    def optimizer_ends(self, optimizer: object) -> None:
        """Ends the range of a step, unless the step has begun before the block."""
        begun = self._thread_state.optimizers.pop(id(optimizer), None)
        if begun is not None:
            begun.end()


class _Range:
    """A context that records one range of the thread that enters it."""

    __slots__ = (
        "_asks_for_core", "_call", "_core", "_detail", "_marks", "_name", "_profiled", "_ran", "_recorder", "_slot",
        "_start", "_streams", "_thread_state",
    )  # fmt: skip

    def __init__(
        self,
        recorder: Recorder,
        state: _ThreadState,
        name: str,
        detail: str = "",
        slot: int | None = None,
        call: int = -1,
        profiled: AbstractContextManager[Any] | None = None,
        streams: Mapping[torch.device, torch.Stream] | None = None,
    ) -> None:
        self._recorder, self._thread_state = recorder, state
        self._name, self._detail, self._slot, self._call = name, detail, slot, call
        self._profiled, self._streams = profiled, streams
        self._asks_for_core = slot is None or call >= 0

    def begin(self) -> _Range:
        """Reads the clocks last, so that the range has as little of its own cost as possible."""
        clocks = self._thread_state.clocks
        self._marks = self._recorder.clock.marks(self._streams) if self._streams else None
        self._core = clocks.waited_for_core() if self._asks_for_core else None
        self._ran = clocks.ran()
        self._start = time.perf_counter_ns()
        return self

    def end(self) -> None:
        """Reads the clocks first."""
        end = time.perf_counter_ns()
        state, recorder = self._thread_state, self._recorder
        ran = state.clocks.ran() - self._ran
        core = state.clocks.waited_for_core() if self._asks_for_core else None
        marks = None
        if self._marks and self._streams:
            marks = self._marks, recorder.clock.marks(self._streams)
        recorder.spans.append(
            Span(
                self._name, self._detail, self._slot, self._call, state.thread, self._start, end, ran,
                None if core is None or self._core is None else core - self._core, marks,
            )
        )  # fmt: skip

    def __enter__(self) -> _Range:
        if self._profiled is not None:
            self._profiled.__enter__()
        self._thread_state.open.append(self._name)
        return self.begin()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.end()
        self._thread_state.open.pop()
        if self._profiled is not None:
            self._profiled.__exit__(kind, error, traceback)


class _Replicas(profiling.Replicas):
    """The `profiling.Replicas` of one call."""

    def __init__(self, recorder: Recorder, call: int, module: str, devices: list[torch.device]) -> None:
        self._recorder, self._call, self._module, self._devices = recorder, call, module, devices
        self._streams = current_streams(devices)  # the caller's, which become the replicas'
        self._waiting = dict.fromkeys(range(len(devices)), time.perf_counter_ns())

    def run_replica(self, slot: int, task: Callable[[], T]) -> T:
        """See `profiling.Replicas`."""
        recorder = self._recorder
        device, profiled = self._devices[slot], profiling.profiled(f"replica {slot}")
        own = {device: self._streams[device]} if device in self._streams else None
        with _Range(recorder, recorder._thread_state, "replica", self._module, slot, self._call, profiled, own):
            return task()

    def waits(self, slot: int) -> None:
        """See `profiling.Replicas`."""
        self._waiting[slot] = time.perf_counter_ns()

    def admitted(self, slot: int) -> None:
        """See `profiling.Replicas`."""
        since = self._waiting.pop(slot, None)
        if since is not None:
            self._recorder.waits.append(Wait(self._call, slot, since, time.perf_counter_ns()))


_changing = threading.Lock()


@in_forked_child
def _start_afresh_after_fork() -> None:
    """Another thread may have held the lock when the process was forked."""
    global _changing
    _changing = threading.Lock()


def start(recorder: Recorder) -> None:
    """Makes ``recorder`` the recorder of the process.

    Raises:
        RuntimeError: another trace runs in this process.
    """
    with _changing:
        if profiling.recorder is not None:
            raise RuntimeError(
                "a trace runs in this process already, and it records the calls of all threads: end its block before "
                "another one begins"
            )
        profiling.recorder = recorder


def stop(recorder: Recorder) -> None:
    """Ends the recording, except of ranges that have begun."""
    with _changing:
        if profiling.recorder is recorder:
            profiling.recorder = None
