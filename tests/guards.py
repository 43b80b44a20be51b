"""A command that takes out every wait between streams, every ``record_stream`` and every event, one at a time.

For each it says which test notices, on which kind of devices, and by what: a race, memory that is freed too early, a
value, an error. A guard that nobody notices is redundant, or a test is missing. From the root of the repository::

    python tests/guards.py --kind sim                                   # all guards, on simulated devices
    python tests/guards.py --kind both --cuda-python OTHER/bin/python   # and on CUDA, or its stand-in
    python tests/guards.py --list                                       # only their names
    python tests/guards.py --only comm/streams/arrivals --jobs 4 --table guards.csv

It works in copies of the repository in a scratch folder. The first run of a kind notes which tests come to which guards
(``--map FOLDER`` keeps that). Then each guard is taken out of a copy, and those tests run until one fails. A guard is
named ``file:function:call:number``. It is no test, and nothing calls it but a person. ``guarded_calls.py`` finds the
guards, ``taken_out.py`` is what runs in the place of one.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from queue import Queue

from guarded_calls import Guard, guards_of, with_notes, without

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("sim", "cuda")
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".hypothesis", "build", "*.egg-info", "latest")
FIRST_ROUND = 30


@dataclass
class Found:
    """What became of one guard on one kind of devices."""

    verdict: str  # race, freed too early, value, error, hangs, nobody, no test comes here
    test: str = ""
    words: str = ""
    ran: int = 0
    reached: int = 0


@dataclass
class Map:
    """Which tests come to which guards: those that pass, each with its seconds."""

    tests: dict[str, set[str]]
    seconds: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> Map:
        """Reads what `taken_out` wrote."""
        tests, seconds, failed = defaultdict(set), defaultdict(float), set()
        for file in folder.glob("reached*"):
            for line in file.read_text().splitlines():
                guard, _, test = line.partition("\t")
                tests[guard].add(test)
        for file in folder.glob("ended*"):
            for line in file.read_text().splitlines():
                test, outcome, took, _ = line.split("\t", 3)
                seconds[test] += float(took)
                if outcome != "passed":
                    failed.add(test)
        known = seconds.keys() - failed
        return cls({guard: each & known for guard, each in tests.items()}, dict(seconds))

    def rounds(self, guard: str, budget: float) -> list[list[str]]:
        """The guard's tests: a short round, then the rest within ``budget``.

        First those of files named after the guard's. Then the others take turns, those of its folder first. Each gives
        its short tests first.
        """
        room, file = guard.partition(".py:")[0].rpartition("/")[::2]

        def is_near(tests: list[str]) -> bool:
            return f"{room}/test_{file}" in tests[0]

        def is_far(tests: list[str]) -> tuple[bool, int]:
            return f"tests/{room}/" not in tests[0], -len(tests)

        by_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(self.tests.get(guard, ()), key=lambda test: (self.seconds[test], test)):
            by_file[test.partition("::")[0]].append(test)
        files = sorted(by_file.values(), key=is_far)
        near, others = filter(is_near, files), [tests for tests in files if not is_near(tests)]
        turns = [*chain.from_iterable(near), *(test for turn in zip_longest(*others) for test in turn if test)]
        rest, left = [], budget
        for test in turns[FIRST_ROUND:]:
            left -= self.seconds[test] + 0.02
            if left > 0:
                rest.append(test)
        return [each for each in (turns[:FIRST_ROUND], rest) if each]


class Copy:
    """A copy of the repository in which a guard is taken out. Who edits the repository meanwhile disturbs nothing."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
        self.folder = folder
        self.guards = guards_of(folder)
        self.texts = {file: (folder / file).read_text(encoding="utf-8") for file in self.guards}

    def change(self, file: str, text: str) -> None:
        """Writes one file of the package."""
        (self.folder / file).write_text(text, encoding="utf-8")

    def pytest(self, python: str, kind: str, arguments: Iterable[str], log: Path, limit: float) -> int | None:
        """Runs tests in the copy; what `taken_out` notes goes to the folder ``log``. ``None`` if it ran too long."""
        log.mkdir(parents=True, exist_ok=True)
        paths = os.pathsep.join([str(self.folder), str(self.folder / "tests")])
        environment = {**os.environ, "PYTHONPATH": paths, "GUARDS_LOG": str(log), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [python, "-m", "pytest", "-q", "-p", "taken_out", "-p", "no:cacheprovider", f"--devices={kind}"]
        with (log / "output").open("a") as output:
            process = subprocess.Popen(
                [*command, *arguments], cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                return None


def make_map(kind: str, python: str, folder: Path, work: Path, tests: list[str], jobs: int) -> None:
    """Runs the tests once, the long ones too, with a note at each guard."""
    if (folder / "complete").exists():
        return
    copy = Copy(work / f"noting_{kind}")
    for file, guards in copy.guards.items():
        copy.change(file, with_notes(copy.texts[file], guards))

    def run(which: str) -> None:
        log = folder / which.replace("/", "_")
        if not (log / "complete").exists():
            copy.pytest(python, kind, ["--all", which], log, limit=7200)
            (log / "complete").touch()
            say(f"{kind}: noted {which}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, tests))


def read_maps(folder: Path) -> Map:
    """The maps of all runs below a folder, as one."""
    whole = Map(defaultdict(set), {})
    for part in sorted(each for each in folder.iterdir() if each.is_dir()):
        one = Map.read(part)
        for guard, tests in one.tests.items():
            whole.tests[guard] |= tests
        whole.seconds |= one.seconds
    return whole


def take_out(guard: Guard, kind: str, python: str, known: Map, copy: Copy, log: Path, budget: float) -> Found:
    """Runs the guard's tests without it, until one fails."""
    rounds = known.rounds(guard.name, budget)
    found = Found("no test comes here" if not rounds else "nobody", reached=len(known.tests.get(guard.name, ())))
    original = copy.texts[guard.file]
    copy.change(guard.file, without(original, guard))
    try:
        for tests in rounds:
            shutil.rmtree(log, ignore_errors=True)
            limit = 120 + 4 * budget
            status = copy.pytest(python, kind, ["-x", *tests], log, limit)
            ended = [line.split("\t", 3) for file in log.glob("ended*") for line in file.read_text().splitlines()]
            found.ran += len({test for test, *_ in ended})
            failed = next((line for line in ended if line[1] == "failed"), None)
            if failed is not None:
                found.test, found.words = failed[0], failed[3]
                found.verdict = verdict_of(found.words)
                return found
            if status is None:
                found.verdict, found.words = "hangs", f"no end after {limit:.0f} s"
                return found
            if status != 0:
                found.verdict, found.words = "error", (log / "output").read_text()[-300:].replace("\n", " | ")
                return found
    finally:
        copy.change(guard.file, original)
    return found


def verdict_of(words: str) -> str:
    """By what a test noticed, from the words of its error."""
    for verdict, signs in {
        "race": ("race:",),
        "freed too early": ("freed too early",),
        "hangs": ("watchdog", "Timeout"),
        "value": ("not close", "not equal", "AssertionError", "assert "),
    }.items():
        if any(sign in words for sign in signs):
            return verdict
    return "error"


def say(text: str) -> None:
    """Prints a line with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


class Table:
    """The results, written after each guard. Guards that are in the file already are not run again."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.rows: dict[tuple[str, str], Found] = {}
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    found = Found(row["verdict"], row["test"], row["words"], int(row["ran"]), int(row["reached"]))
                    self.rows[row["guard"], row["kind"]] = found

    def add(self, guard: str, kind: str, found: Found) -> None:
        """Adds a row."""
        with self._lock:
            self.rows[guard, kind] = found
            with self._path.open("w", newline="") as file:
                out = csv.writer(file)
                out.writerow(["guard", "kind", "verdict", "test", "words", "ran", "reached"])
                for (name, of_kind), row in sorted(self.rows.items()):
                    out.writerow([name, of_kind, row.verdict, row.test, row.words, row.ran, row.reached])

    def summary(self, names: list[str]) -> str:
        """How many guards are noticed by whom."""
        counts: dict[str, int] = defaultdict(int)
        for name in names:
            rows = {kind: self.rows.get((name, kind)) for kind in KINDS}
            if not any(rows.values()):
                counts["not run"] += 1
                continue
            by = [kind for kind, row in rows.items() if row and row.verdict not in ("nobody", "no test comes here")]
            missing = [kind for kind, row in rows.items() if row is None]
            suffix = f" ({' and '.join(missing)} not run)" if missing else ""
            counts[f"noticed by {' and '.join(by) or 'nobody'}{suffix}"] += 1
        return "\n".join(f"{count:5d}  {what}" for what, count in sorted(counts.items()))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", help="files or folders whose tests may notice (default: all folders)")
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="sim")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="guards whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the guards, and run nothing")
    parser.add_argument("--python", default=sys.executable, help="for simulated devices (default: this one)")
    parser.add_argument("--cuda-python", default=sys.executable, help="for CUDA (default: this one)")
    parser.add_argument("--map", type=Path, metavar="FOLDER", help="where it is kept which tests come to which guards")
    parser.add_argument("--table", type=Path, default=Path("guards.csv"), help="the result; rows that it has are kept")
    parser.add_argument("--seconds", type=float, default=120, help="of tests that one guard gets (default: 120)")
    parser.add_argument("--map-only", action="store_true", help="make the map, and take out nothing")
    options = parser.parse_args()

    guards = [*chain.from_iterable(guards_of(ROOT).values())]
    chosen = [guard for guard in guards if not options.only or any(part in guard.name for part in options.only)]
    if options.list:
        print("\n".join(guard.name for guard in chosen), f"{len(chosen)} of {len(guards)} guards", sep="\n")
        return
    kinds = KINDS if options.kind == "both" else (options.kind,)
    pythons = {"sim": options.python, "cuda": options.cuda_python}
    tests = options.tests or [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").iterdir())
        if path.name.startswith("test_") or (path.is_dir() and any(path.rglob("test_*.py")))
    ]
    table = Table(options.table)
    with tempfile.TemporaryDirectory(prefix="guards_") as scratch:
        work = Path(scratch)
        folder = options.map or work / "map"
        for kind in kinds:
            make_map(kind, pythons[kind], folder / kind, work, tests, options.jobs)
        if not options.map_only:
            copies: Queue[Copy] = Queue()
            for job in range(options.jobs):
                copies.put(Copy(work / f"copy_{job}"))
            maps = {kind: read_maps(folder / kind) for kind in kinds}

            def run(guard: Guard, kind: str) -> None:
                if (guard.name, kind) in table.rows:
                    return
                copy = copies.get()
                try:
                    guard = next(each for each in copy.guards[guard.file] if each.name == guard.name)
                    log = work / "logs" / kind / guard.name.replace("/", "_")
                    found = take_out(guard, kind, pythons[kind], maps[kind], copy, log, options.seconds)
                finally:
                    copies.put(copy)
                table.add(guard.name, kind, found)
                say(f"{kind}: {guard.name}: {found.verdict} {found.test}")

            with ThreadPoolExecutor(options.jobs) as pool:
                list(pool.map(lambda each: run(*each), [(guard, kind) for guard in chosen for kind in kinds]))
    print(table.summary([guard.name for guard in chosen]))


if __name__ == "__main__":
    main()
