"""`on_processes`: runs a function in n processes, one for each rank, and says what has become of each.

The ranks are forked by the server of this test run. This file asks for them, reads what they write, and watches the
time. Nothing of a run is left when the call returns, however it does: no process, no file, no open port.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dataparallel.testing.ranks import comms
from dataparallel.testing.ranks.child import RankCall, find
from dataparallel.testing.ranks.reports import TAIL, Ended, How, conclude
from dataparallel.testing.ranks.start import server

GRACE = 1.0  # seconds that the other ranks have after one has failed, to say what they have seen of it
FLOOD = 64 * 2**20  # bytes of output that a rank may write

STOPPED = "was stopped, as another rank had failed"

MOST = 100  # ranks: two pipes for each travel in one message, of which 253 descriptors can be part


def on_processes(
    function: Callable[..., Any],
    /,
    *args: Any,
    ranks: int = 2,
    backend: str | None = None,
    timeout: float = 60.0,
    comms: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Calls ``function(rank, *args, **kwargs)`` in a process for each rank.

    Every rank starts like a new process that has imported torch, in the same folder and with the same environment,
    with seed 0, with one thread for operators unless ``OMP_NUM_THREADS`` is set, and without a terminal. Its temporary
    files are removed after the run. What the ranks print is printed here at the end, or is part of the error.

    If a rank fails, the others get a second to say what they have seen of it. Then they are killed, and so are all
    processes that the ranks have started.

    Args:
        function: a function of a module, not a nested one: the processes look it up by its file and its name.
        *args: what can be pickled.
        ranks: how many.
        backend: of the process group; nccl if there is a CUDA device for each rank, else gloo.
        timeout: seconds. After that all ranks print all their stacks, and are killed.
        comms: if the function starts with a process group; `with_comms` makes one later.
        **kwargs: what can be pickled.

    Returns:
        What the ranks have returned, in their order.

    Raises:
        RanksFailed: an `AssertionError` that names the rank that failed first, and says for each rank how it ended.
        unittest.SkipTest: if a rank has skipped the test, or if this torch or system lacks what it needs.
        TypeError: if the function cannot be found by its file and name, or an argument cannot be pickled.
        ValueError: if ``ranks`` or ``timeout`` is out of range.
    """
    __tracebackhide__ = True
    if not 1 <= ranks <= MOST:
        raise ValueError(f"a test runs in 1 to {MOST} processes; got ranks={ranks!r}")
    if not timeout > 0:
        raise ValueError(f"a timeout is a number of seconds, more than 0; got {timeout!r}")
    found = find(function)
    try:
        arguments = pickle.dumps((args, kwargs))
    except Exception as error:
        raise TypeError(
            f"the arguments of {found.name} go to other processes, but cannot be pickled: {error}"
        ) from error
    if not hasattr(os, "fork"):
        raise unittest.SkipTest("tests in several processes fork them, which this system cannot")
    backend = _backend(backend, ranks, comms)
    call = RankCall(
        found=found,
        arguments=arguments,
        count=ranks,
        backend=backend,
        comms=comms,
        cuda=backend is not None and "nccl" in backend,
        timeout=timeout,
        folder=os.getcwd(),
        path=list(sys.path),
        variables=dict(os.environ),
        argv=list(sys.argv),
    )
    began = time.monotonic()
    ended = _ProcessRun(call).ended()
    results = conclude("processes", ended, time.monotonic() - began)
    for end in ended:
        if end.output:
            print("\n".join(f"[rank {end.number}] {line}" for line in end.output.splitlines()))
    return results


def _backend(backend: str | None, ranks: int, needed: bool) -> str | None:
    try:
        if backend is None:
            return comms.choose_backend(ranks)
        comms.require(backend)
    except unittest.SkipTest:
        if needed:
            raise
    return backend


class _Rank:
    """What this process knows of a rank."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.output = bytearray()
        self.written = 0
        self.word = bytearray()
        self.code: int | None = None
        self.at = 0.0
        self.why = ""  # the reason, if this process has ended it
        self.stacks = ""

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self.output += data
        del self.output[: -2 * TAIL]


class _ProcessRun:
    """One run: from the pipes to what has become of each rank."""

    def __init__(self, call: RankCall) -> None:
        self.call = call
        self.ranks = [_Rank(number) for number in range(call.count)]
        self.processes: list[int] = []
        self.selector = selectors.DefaultSelector()
        self.news = bytearray()
        self.stopping: float | None = None  # when the others are stopped after one has failed

    def ended(self) -> list[Ended]:
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        try:
            (folder / "call").write_bytes(pickle.dumps(self.call))
            ours, theirs = socket.socketpair()
            pipes: list[int] = []
            with ours:
                try:
                    with theirs:
                        pipes = self._pipes()
                        self.processes = server.start(folder, [theirs.fileno(), *pipes], ours)
                finally:
                    for descriptor in pipes:
                        os.close(descriptor)
                ours.setblocking(False)
                self.selector.register(ours, selectors.EVENT_READ, None)
                try:
                    self._watch(ours, folder)
                finally:
                    self._end(ours)
            return [_ended(rank) for rank in self.ranks]
        finally:
            for key in list(self.selector.get_map().values()):
                if isinstance(key.fileobj, int):
                    os.close(key.fileobj)
            self.selector.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _pipes(self) -> list[int]:
        """Two pipes for each rank; returns the ranks' ends."""
        theirs = []
        for rank in self.ranks:
            for receive in (rank.write, rank.word.extend):
                reading, writing = os.pipe()
                os.set_blocking(reading, False)
                self.selector.register(reading, selectors.EVENT_READ, receive)
                theirs.append(writing)
        return theirs

    def _alive(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.code is None]

    def _watch(self, connection: socket.socket, folder: Path) -> None:
        """Until every rank has ended, one has failed and the others have had their time, or the time is over."""
        deadline = time.monotonic() + self.call.timeout
        while self._alive():
            now = time.monotonic()
            until = deadline if self.stopping is None else min(deadline, self.stopping)
            floods = [rank for rank in self._alive() if rank.written > FLOOD]
            if now >= until or floods:
                self._stacks(connection, folder)
                for rank in self._alive():
                    rank.at = now
                    rank.why = STOPPED
                    if rank in floods:
                        rank.why = f"wrote more than {FLOOD >> 20} MiB of output"
                    elif self.stopping is None and not floods:
                        rank.why = f"did not end within {self.call.timeout:g} s"
                return
            if not self._read(until - now):
                return
            if self.stopping is None and any(rank.code not in (None, 0) for rank in self.ranks):
                self.stopping = now + GRACE

    def _read(self, wait: float) -> bool:
        """Reads what there is. False once nothing of the run is left."""
        for key, _ in self.selector.select(wait):
            if isinstance(key.fileobj, int):
                self._drain(key.fileobj, key.data, once=True)
                continue
            assert isinstance(key.fileobj, socket.socket)
            try:
                data = key.fileobj.recv(65536)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self.selector.unregister(key.fileobj)
                return False
            self.news += data
            *lines, rest = bytes(self.news).split(b"\n")
            self.news = bytearray(rest)
            for line in lines:
                self._hear(json.loads(line))
        return True

    def _hear(self, news: dict[str, Any]) -> None:
        rank = self.ranks[news["rank"]]
        rank.code = news["code"]
        rank.at = rank.at or news["at"]

    def _drain(self, descriptor: int, receive: Callable[[bytes], None], once: bool = False) -> None:
        with suppress(BlockingIOError):
            while True:
                data = os.read(descriptor, 1 << 18)
                if not data:
                    self.selector.unregister(descriptor)
                    os.close(descriptor)
                    return
                receive(data)
                if once:
                    return

    def _stacks(self, connection: socket.socket, folder: Path) -> None:
        """Lets the ranks that still run write down what all their threads do; one that is stopped cannot."""
        with suppress(OSError):
            connection.send(b"s")
        files = {rank.number: folder / f"stacks{rank.number}" for rank in self._alive()}
        until, before = time.monotonic() + 1, None
        while time.monotonic() < until:
            self._read(0.05)
            sizes = [file.stat().st_size if file.exists() else 0 for file in files.values()]
            if all(sizes) and sizes == before:
                break
            before = sizes
        for number, file in files.items():
            self.ranks[number].stacks = file.read_text(errors="replace") if file.exists() else ""

    def _end(self, connection: socket.socket) -> None:
        """Ends what still runs, and waits until the server says that nothing is left."""
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + 10
        while connection in self.selector.get_map() and time.monotonic() < until:
            self._read(0.1)
        if self._alive():  # the server is gone
            for process in self.processes:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process, signal.SIGKILL)
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, int):
                self._drain(key.fileobj, key.data)


def _ended(rank: _Rank) -> Ended:
    """What has become of a rank, by its last word or without one."""
    output = rank.output[-TAIL:].decode(errors="replace")
    if rank.written > len(rank.output):
        output = f"[... of {rank.written:,} bytes]\n{output}"
    if rank.why:
        how: How = "stopped" if rank.why == STOPPED else "died"
        return Ended(rank.number, how, rank.why, rank.at, output=output, stacks=rank.stacks)
    try:
        ended: Ended = pickle.loads(rank.word)
    except Exception as error:
        if rank.word:
            what = f"has said something that cannot be understood here: {type(error).__name__}: {error}"
        elif rank.code is None:
            what = "is lost: the fork server of the tests has ended"
        elif rank.code < 0:
            what = f"was killed by {_signal(-rank.code)}"
        else:
            what = f"left with exit code {rank.code}, without a word"
        ended = Ended(rank.number, "died", what, rank.at)
    server.preload.update(ended.imported)
    ended.output = output
    return ended


def _signal(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
