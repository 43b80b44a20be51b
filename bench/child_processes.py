"""Python processes of the benchmarks: scripts that print what they find, and processes that make steps on command.

`contender` is the script of the latter. This module times and judges nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

from contender import COLLECT, DONE, SAVE
from counted_group import BACKEND as COUNTED
from places import first_lines

BENCH = Path(__file__).resolve().parent
SCRIPT = BENCH / "contender.py"

# The first line of a mapping: addresses, rights, offset in the file, device, inode; then a line for each figure.
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ (?P<offset>[0-9a-f]+) (?P<device>\S+) (?P<inode>\d+)")
FIGURE = re.compile(r"(?P<name>Rss|Anonymous): +(?P<kilobytes>\d+) kB")


def environment(**more: str) -> dict[str, str]:
    """The variables of this process, with ``more``, so that the other imports what this one can, installed or not."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more


def printed_by(script: str, *arguments: object) -> dict[str, Any]:
    """What a script of the benchmarks prints as JSON. Skips the test where it says ``why_not``."""
    command = [sys.executable, str(BENCH / f"{script}.py"), *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "why_not" in printed:
        pytest.skip(first_lines(printed["why_not"]))
    return printed


class Contender:
    """One or more processes that make steps together. A context manager, which ends them.

    The processes take seconds to be ready; the first command waits for them. ``arguments`` has the arguments of
    `contender` for each process, and ``variables`` are added to their environment. What they write to stderr goes to
    files in ``folder``.

    Raises:
        RuntimeError: a process has ended instead of answering. The message has what it wrote.
    """

    def __init__(self, name: str, arguments: Sequence[Sequence[str]], folder: Path, **variables: str) -> None:
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
                            [sys.executable, str(SCRIPT), *own],
                            env=environment(**variables),
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

    def tell(self, command: str) -> None:
        """All processes carry out the command. Returns when the last of them is done."""
        if not self._ready:
            self._wait()
            self._ready = True
        for process in self._processes:
            try:
                process.stdin.write(command + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            except BrokenPipeError as error:
                raise RuntimeError(self._complaint()) from error
        self._wait()

    def collect_garbage(self) -> None:
        self.tell(COLLECT)

    def found(self) -> dict[str, list[dict[str, Any]]]:
        """By way: what each rank has. Raises `AssertionError` unless all ranks have the same gradients, bit by bit."""
        path = self._folder / f"{self._name}.pt"
        self.tell(f"{SAVE}{path}")
        found: dict[str, list[dict[str, Any]]] = torch.load(path)
        for by_rank in found.values():
            for other in by_rank[1:]:
                for gradient, expected in zip(other["gradients"], by_rank[0]["gradients"], strict=True):
                    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
        return found

    def memory(self) -> int | None:
        """Bytes, see `memory_of`."""
        return memory_of([process.pid for process in self._processes])

    def _wait(self) -> None:
        for process in self._processes:
            # Other lines are printed to stdout by a library.
            if DONE + "\n" not in process.stdout:  # type: ignore[operator]
                raise RuntimeError(self._complaint())

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


def ranks(
    name: str,
    folder: Path,
    ways: Sequence[str],
    count: int = 2,
    slots: int = 1,
    counted: bool = False,
    **variables: str,
) -> Contender:
    """``count`` processes with ``slots`` CPU slots each, which make steps by all of ``ways``.

    With ``counted`` they count what they send: see `counted_group`.
    """
    backend = COUNTED if counted else "gloo"
    file = str(folder / f"{name} rendezvous")
    arguments = [[str(slots), *ways, "--", str(rank), str(count), file, backend] for rank in range(count)]
    return Contender(name, arguments, folder, **variables)


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
