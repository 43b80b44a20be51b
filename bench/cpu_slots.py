"""Processes that make training steps: starts them, tells them what to do, and finds how much memory they hold.

`contender`, `sharded_contender` or `free_threads` is the script that they run. This module times and judges nothing.
That is done by `test_cpu_slots.py`, `test_forms.py`, `test_sharded_speed.py`, `test_free_threads.py` and their reports.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from child_processes import environment_of
from contender import ANSWER, COLLECT, DONE, SAVE

SCRIPT = Path(__file__).with_name("contender.py")

# The first line of a mapping: addresses, rights, offset in the file, device, inode; then a line for each figure.
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ (?P<offset>[0-9a-f]+) (?P<device>\S+) (?P<inode>\d+)")
FIGURE = re.compile(r"(?P<name>Rss|Anonymous): +(?P<kilobytes>\d+) kB")


class Contender:
    """One or more processes that make a step together. A context manager, which ends them.

    The processes take seconds to be ready; the first command waits for them. ``arguments`` has the arguments of
    ``script`` for each process, and ``variables`` are added to their environment. What the processes write to stderr
    goes to files in ``folder``. ``python`` is the path of their interpreter: default this one.

    Raises:
        RuntimeError: a process has ended instead of answering. The message has what it wrote.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[Sequence[str]],
        folder: Path,
        script: Path = SCRIPT,
        python: str = sys.executable,
        **variables: str,
    ) -> None:
        self._name = name
        self._errors = [folder / f"{name} {number}.txt" for number in range(len(arguments))]
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        self._ready = False
        try:
            for own, errors in zip(arguments, self._errors, strict=True):
                with errors.open("w") as file:
                    self._processes.append(
                        subprocess.Popen(
                            [python, str(script), *own],
                            env=environment_of(python, **variables),
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=file,
                            text=True,
                        )
                    )
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> Contender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Lets the processes end by themselves, or kills them after an error."""
        if kind is not None:
            self._kill()
            return
        for process in self._processes:
            process.stdin.close()  # type: ignore[union-attr]
        try:
            codes = [process.wait(timeout=60) for process in self._processes]
        finally:
            self._kill()
        if any(codes):
            raise RuntimeError(self._complaint())

    def wait_until_ready(self) -> None:
        if not self._ready:
            self._wait(self._processes)
            self._ready = True

    def tell(self, command: str) -> list[Any]:
        """All processes carry out the command. Returns when the last of them is done, with what they answer, if any."""
        self.wait_until_ready()
        for process in self._processes:
            try:
                process.stdin.write(command + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            except BrokenPipeError as error:
                raise RuntimeError(self._complaint()) from error
        return self._wait(self._processes)

    def collect_garbage(self) -> None:
        self.tell(COLLECT)

    def gradients(self) -> list[Tensor]:
        """The gradients of the last step. Raises `AssertionError` unless all processes have the same."""
        path = self._folder / f"{self._name}.pt"
        found: list[list[Tensor]] = []
        for process in self._processes:
            process.stdin.write(f"{SAVE}{path}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            self._wait([process])
            found.append(torch.load(path))
        for other in found[1:]:
            for gradient, expected in zip(other, found[0], strict=True):
                torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
        return found[0]

    def saved(self) -> Any:
        """What the first process saves when all of them are told to, together."""
        path = self._folder / f"{self._name}.pt"
        self.tell(f"{SAVE}{path}")
        return torch.load(path)

    def memory(self) -> int | None:
        """Bytes, see `memory_of`."""
        return memory_of([process.pid for process in self._processes])

    def _wait(self, processes: Iterable[subprocess.Popen[str]]) -> list[Any]:
        answers = []
        for process in processes:
            # Other lines are printed to stdout by a library.
            for line in process.stdout:  # type: ignore[union-attr]
                if line.startswith(ANSWER):
                    answers.append(json.loads(line.removeprefix(ANSWER)))
                if line == DONE + "\n":
                    break
            else:
                raise RuntimeError(self._complaint())
        return answers

    def _complaint(self) -> str:
        written = "\n".join(path.read_text() for path in self._errors)
        return f"a process of {self._name!r} has ended early or failed:\n{written}"

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):  # an unread command
                    pipe.close()  # type: ignore[union-attr]


def memory_of(processes: Iterable[int]) -> int | None:
    """The proportional set size of these processes together, in bytes, as if no others were on the machine.

    The kernel's own figure, ``Pss``, divides a page by the number of processes that map it. The process of the
    benchmarks maps torch's libraries too, so it would be charged for a part of them, and for a larger part the fewer
    processes there are. So each page of a file is counted once here, however many of ``processes`` map it. Where two
    processes have mapped different pages of the same part of a file, only the larger number counts, which makes several
    processes look a little smaller than they are.

    Returns:
        `None` where the system has no ``/proc/PID/smaps``.
    """
    anonymous = 0
    files: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps").read_text().splitlines()
        except FileNotFoundError:
            return None
        resident: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        place: tuple[str, str, str] | None = None
        for line in lines:
            if mapping := MAPPING.match(line):
                on_disk = mapping["inode"] != "0"
                place = (mapping["device"], mapping["inode"], mapping["offset"]) if on_disk else None
            elif figure := FIGURE.match(line):
                size = 1024 * int(figure["kilobytes"])
                if figure["name"] == "Anonymous":
                    # Pages of a file that the process has written to belong to the process.
                    anonymous += size
                    size = -size
                if place is not None:
                    resident[place] += size
        for place, size in resident.items():
            files[place] = max(files[place], size)
    return anonymous + sum(files.values())
