"""The fork server: one process that has imported torch, and starts each rank in milliseconds by forking.

The run of tests starts one when it is first needed, and the server ends with it, however it ends. It never computes,
so a forked rank is like a process that has just imported torch. It also sees the ranks die, and ends what they leave.

Over the control socket come runs: a list in JSON of the path of the run's folder and of the modules that ranks are
likely to import, and with it a socket for this run and two pipes for each rank, for its output and for its last word.
Over the run's socket the server sends lines of JSON: the process ids, then for each rank its number, its exit code and
when it ended. The byte ``s`` asks the ranks for their stacks, the end of the connection ends them. The server closes
its end once nothing of the run is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dataparallel.testing.ranks import child

PRELOADED = ("torch.distributed",)

# A dead rank's own children may end by themselves, as Python's tracker of shared memory does, which then removes what
# the rank has left. So they are killed that many seconds after it only.
LINGER = 0.5


@dataclass
class _ServedRun:
    folder: str
    socket: socket.socket
    alive: dict[int, int] = field(default_factory=dict)  # from process id to rank
    lingering: dict[int, float] = field(default_factory=dict)  # the groups of dead ranks, and until when they may stay
    news: list[dict[str, float]] = field(default_factory=list)  # ranks whose group is still lingering
    ending: bool = False


def serve(descriptor: int) -> None:
    """Serves until the other end of the control socket is closed."""
    warnings.simplefilter("ignore")
    import_all(PRELOADED)
    server = _Server(socket.socket(fileno=descriptor))
    try:
        server.loop()
    finally:
        server.end_all()


def import_all(names: Iterable[str]) -> None:
    """Imports what ranks would import otherwise, each of them."""
    new = [name for name in names if name not in sys.modules]
    for name in new:
        with contextlib.suppress(Exception):  # a rank that needs it says why it cannot be imported
            importlib.import_module(name)
    if new:
        gc.collect()
        gc.freeze()  # ranks share this memory as long as nobody writes to it


def _adopt() -> None:
    """Makes this process the parent of orphans below it, so that it can end them. Only Linux has that."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.runs: list[_ServedRun] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, None)
        # A signal that arrives between two waits makes this socket readable, so that no death is missed.
        self.woken, self.waker = socket.socketpair()
        self.woken.setblocking(False)
        self.waker.setblocking(False)
        self.selector.register(self.woken, selectors.EVENT_READ, None)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        _adopt()

    def loop(self) -> None:
        while True:
            wait = 0.02 if any(run.lingering or not run.alive for run in self.runs) else None
            for key, _ in self.selector.select(wait):
                if key.fileobj is self.control:
                    if not self.start():
                        return
                elif key.fileobj is self.woken:
                    with contextlib.suppress(BlockingIOError):
                        self.woken.recv(4096)
                elif key.data is not None:
                    self.obey(key.data)
            self.reap()
            for run in list(self.runs):
                self.clear(run)

    def start(self) -> bool:
        """Forks the ranks of one run. False if nobody will ask for another run."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, 4096, 253)
        except OSError:
            return False
        if not message:
            return False
        folder, preload = json.loads(message)
        import_all(preload)
        run = _ServedRun(folder, socket.socket(fileno=descriptors[0]))
        pipes = [(descriptors[at], descriptors[at + 1]) for at in range(1, len(descriptors), 2)]
        for number, (output, word) in enumerate(pipes):
            process = os.fork()
            if process == 0:
                self.become(folder, number, output, word, keep=descriptors)
            run.alive[process] = number
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        self.runs.append(run)
        self.selector.register(run.socket, selectors.EVENT_READ, run)
        self.tell(run, {"processes": list(run.alive)})
        return True

    def become(self, folder: str, number: int, output: int, word: int, keep: list[int]) -> None:
        """In the child: leaves the server behind and is a rank. Does not return."""
        try:
            os.setsid()  # so that a rank's own children are killed with it
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            for each in [self.control, self.woken, self.waker, *(run.socket for run in self.runs)]:
                each.close()
            for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
                os.dup2(descriptor, target)
            for descriptor in keep:
                if descriptor != word:
                    os.close(descriptor)
            child.run(folder, number, word)
        finally:
            os._exit(child.LOST)  # `run` never returns

    def obey(self, run: _ServedRun) -> None:
        try:
            order = run.socket.recv(1)
        except OSError:
            order = b""
        if order == b"s":
            self.signal(run, child.STACKS)
        elif not run.ending:
            run.ending = True
            self.selector.unregister(run.socket)
            self.signal(run, signal.SIGKILL)

    def signal(self, run: _ServedRun, number: int) -> None:
        for process in run.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def orphans(self) -> list[int]:
        """Processes that were started by ranks which have ended."""
        ranks = {process for run in self.runs for process in run.alive}
        children = []
        for file in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children += [int(process) for process in file.read_text().split()]
        return [process for process in children if process not in ranks]

    def reap(self) -> None:
        for process in self.orphans():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)
        for run in self.runs:
            for process, number in list(run.alive.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    now = time.monotonic()
                    del run.alive[process]
                    run.lingering[process] = now + LINGER
                    run.news.append(
                        {
                            "rank": number,
                            "process": process,
                            "code": os.waitstatus_to_exitcode(status),
                            "at": now,
                        }
                    )

    def clear(self, run: _ServedRun) -> None:
        """Tells of dead ranks once all their children are gone; forgets the run once nothing is left of it."""
        for process, until in list(run.lingering.items()):
            try:
                os.killpg(process, 0)
                if time.monotonic() > until:
                    os.killpg(process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                del run.lingering[process]
        for news in [news for news in run.news if news["process"] not in run.lingering]:
            run.news.remove(news)
            self.tell(run, news)
        if run.alive or run.lingering:
            return
        # Orphans in sessions of their own. Whose they are cannot be seen, so those of another run may be among them.
        orphans = self.orphans() if self.runs == [run] else []
        for process in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not orphans:
            if not run.ending:
                self.selector.unregister(run.socket)
            run.socket.close()
            self.runs.remove(run)

    def tell(self, run: _ServedRun, news: object) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            run.socket.sendall(json.dumps(news).encode() + b"\n")

    def end_all(self) -> None:
        """Ends all ranks, and removes what their runs would remove that nobody waits for any more."""
        for run in self.runs:
            for process in [*run.alive, *run.lingering]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process, signal.SIGKILL)
            for process in run.alive:
                os.waitpid(process, 0)
            shutil.rmtree(run.folder, ignore_errors=True)
        for process in self.orphans():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
