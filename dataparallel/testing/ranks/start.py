"""The test run's end of the fork server: starts it when it is first needed, and asks it for ranks."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

START = 120.0  # seconds for the fork server to import torch on a busy machine


class Server:
    """The fork server of this process, started when it is first needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.owner = 0
        self.preload: set[str] = set()  # what ranks have imported: the next ones are likely to need it

    def start(self, folder: Path, descriptors: list[int], answer: socket.socket) -> list[int]:
        """Forks the ranks of one run, and returns their process ids."""
        with self.lock:
            if self.owner != os.getpid() or self.process is None or self.process.poll() is not None:
                self._open()
            assert self.control is not None
            message = json.dumps([str(folder), sorted(self.preload)])
            try:
                socket.send_fds(self.control, [message.encode()], descriptors)
                answer.settimeout(START)
                line = _line(answer)
            except OSError as error:
                raise RuntimeError(f"the fork server of the tests does not answer: {error}") from error
        if not line:
            raise RuntimeError("the fork server of the tests has ended; its error is on stderr")
        processes: list[int] = json.loads(line)["processes"]
        return processes

    def _open(self) -> None:
        self.control, theirs = socket.socketpair()
        script = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from dataparallel.testing.ranks.server import serve; serve(int(sys.argv[2]))"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process, which then ends the ranks
            )
        self.owner = os.getpid()

    def close(self) -> None:
        """Ends the server, and with it all ranks."""
        if self.owner != os.getpid() or self.control is None or self.process is None:
            return
        self.control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.control = self.process = None


server = Server()
atexit.register(server.close)


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line
