"""Ranks that fail, and what a failed rank must not leave behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import torch

from dataparallel.testing import Rank
from dataparallel.testing.ranks import start

FAULTS = {
    "raises": "raised ValueError: on purpose",
    "exits": "left with exit code 3, without a word",
    "leaves": "left with exit code 3, by SystemExit",
    "is_killed": "was killed by SIGKILL",
    "crashes": "was killed by SIGSEGV",
    "hangs": "did not end within",
    "floods": "wrote more than 64 MiB of output",
}


def fail(rank: Rank, fault: str, told: str | None = None) -> None:
    """Rank 1 does it, while the others wait for it in a collective, or sleep if there is no process group."""
    if rank.number == 1:
        if told is not None:
            leave_things(Path(told))
        do(fault)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    else:
        time.sleep(100)


def do(fault: str) -> None:
    if fault == "raises":
        raise ValueError("on purpose")
    if fault == "exits":
        os._exit(3)
    if fault == "leaves":
        sys.exit(3)
    if fault == "is_killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hangs":
        time.sleep(100)
    for _ in range(100):
        os.write(1, b"x" * 2**20)
    time.sleep(100)


def leave_things(told: Path) -> None:
    """Starts processes, opens a port, makes a file and shared memory, and tells where."""
    # One is in this rank's session, one in a session of its own.
    started = [subprocess.Popen(["sleep", "100"], start_new_session=own).pid for own in (False, True)]
    server = socket.create_server(("127.0.0.1", 0))
    _, file = tempfile.mkstemp()
    memory = shared_memory.SharedMemory(create=True, size=8)
    text = json.dumps({"started": started, "port": server.getsockname()[1], "file": file, "memory": memory.name})
    told.write_text(text)


def left(told: Path) -> list[str]:
    """Which of these things are still there."""
    things = json.loads(told.read_text())
    found = [f"process {process}" for process in things["started"] if psutil.pid_exists(process)]
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", things["port"]), 1):
        found.append(f"port {things['port']}")
    if Path(things["file"]).exists():
        found.append(things["file"])
    with contextlib.suppress(FileNotFoundError):
        shared_memory.SharedMemory(things["memory"]).close()
        found.append(f"shared memory {things['memory']}")
    return found


def children() -> set[int]:
    """The processes below this one, without the fork server itself."""
    server = start.server.process
    below = {child.pid for child in psutil.Process().children(recursive=True)}
    return below - ({server.pid} if server is not None else set())


def listening() -> set[int]:
    """The ports that this process and those below it listen at."""
    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found |= {at.laddr.port for at in process.net_connections("inet") if at.status == psutil.CONN_LISTEN}
    return found


def descriptors() -> int:
    return psutil.Process().num_fds()
