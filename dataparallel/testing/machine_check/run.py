"""`check` makes all checks of this machine in order, each with a time after which it hangs; `main` is the command."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from dataparallel._version import __version__
from dataparallel.arguments import checked
from dataparallel.devices import all_devices
from dataparallel.integrations.machine import about, about_cupy, about_torch
from dataparallel.testing.machine_check import failures, forms, predictions, speed, streams, transfers
from dataparallel.testing.machine_check.checks import Check, CheckedMachine, CheckFailed, NotHere, Seen
from dataparallel.testing.machine_check.report import CheckReport, Finding

CHECKS: Sequence[Check] = (
    *transfers.CHECKS,
    *forms.CHECKS,
    *failures.CHECKS,
    *streams.CHECKS,
    *speed.CHECKS,
    *predictions.CHECKS,
)
"""In the order in which they are made: what is wrong first, how fast it is last."""

SECONDS = 120.0
_TEMPLATE = "the template 'check of a machine'"


def check(
    seconds: float = SECONDS,
    *,
    checks: Sequence[Check] | None = None,
    show: Callable[[str], object] | None = None,
) -> CheckReport:
    """Checks that this machine computes with the library what one device computes, and measures how fast.

    On several accelerators all are used, on one there are two slots on it, and without any two on the CPU. It takes
    memory of all devices, some hundred MB for correctness and some GB to measure. It seeds torch's generators, and
    resets the compiler; the current device and streams stay. Nothing is downloaded.

    Args:
        seconds: when to end, above 0. For checks that would not end before there is "no time".
        checks: which ones; default: all.
        show: called with each line of the report as soon as it is known.

    Returns:
        The report. ``print`` shows it as text, a notebook as a table; `CheckReport.passed` says if all is right.
    """
    machine, report = _begin(seconds)
    _make_all(CHECKS if checks is None else checks, machine, report, show)
    return report


def _begin(seconds: float) -> tuple[CheckedMachine, CheckReport]:
    machine = CheckedMachine(ends_at=time.monotonic() + checked("seconds", seconds, float, above=0))
    return machine, CheckReport(_about_machine(), len(all_devices()), shows_little=_shows_little(machine))


def _make_all(
    checks: Sequence[Check], machine: CheckedMachine, report: CheckReport, show: Callable[[str], object] | None
) -> None:
    why = "a check before it hangs"
    try:
        for each in checks:
            finding, hangs = _made(each, machine)
            report.findings.append(finding)
            if show is not None:
                show(finding.line())
            if hangs:
                break
    except KeyboardInterrupt:
        why = "it was interrupted"
        raise
    finally:
        for each in checks[len(report.findings) :]:
            report.findings.append(Finding(each.group, each.name, "no time", 0.0, why))


def _about_machine() -> dict[str, str]:
    devices = all_devices()
    return {
        "dataparallel": __version__,
        "torch": f"{torch.__version__} ({about_torch()}), Python {platform.python_version()}",
        "system": f"{platform.platform()}, {os.cpu_count()} CPU cores",
        "accelerator": about(devices),
        **(_about_cuda(devices) if devices and devices[0].type == "cuda" else {}),
        "CuPy": about_cupy(),
    }


def _about_cuda(devices: Sequence[torch.device]) -> dict[str, str]:
    pairs = [*permutations(devices, 2)]
    peers = sum(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    names = Counter(torch.cuda.get_device_name(device) for device in devices)
    found = {"names": ", ".join(f"{count} x {name}" for name, count in names.items())}
    if importlib.util.find_spec("pynvml") is not None:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        found["driver"] = str(nvml.nvmlSystemGetDriverVersion())
        nvml.nvmlShutdown()
    return {**found, "peers": f"{peers} of {len(pairs)} ordered pairs"} if pairs else found


def _shows_little(machine: CheckedMachine) -> str:
    if machine.root.type == "cpu":
        return "There is no accelerator, so this ran on two slots of the CPU: that shows little about GPUs."
    if not machine.has_gpus:
        return (
            "The devices stand in for GPUs: their times mean nothing, and no kernel and no link of a GPU was checked."
        )
    return "" if len(machine.devices) > 1 else "There is one GPU, so nothing has travelled between devices."


def _made(check: Check, machine: CheckedMachine) -> tuple[Finding, bool]:
    """Makes a check in a thread of its own. Returns what it has found, and whether it hangs."""
    begin = time.monotonic()

    def finding(status: Any, text: str, figures: Any = None) -> Finding:
        return Finding(check.group, check.name, status, time.monotonic() - begin, text, dict(figures or {}))

    if machine.seconds_left() < check.takes:
        return finding("no time", "there was no time"), False
    result: list[Seen | BaseException] = []
    thread = threading.Thread(target=_run, args=(check, machine, result), name=f"check {check.name}", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() - begin < check.hangs_after:
        thread.join(0.1)  # short, so that Ctrl-C is noticed
    if not result:
        frame = sys._current_frames().get(thread.ident or 0)
        where = traceback.format_stack(frame)[-1].strip().replace("\n", ": ") if frame is not None else "nowhere"
        text = f"it hangs: it has not ended after {check.hangs_after:g} s, and waits in {where}. Open an issue"
        return finding("failed", text, {"stack": traceback.format_stack(frame) if frame is not None else []}), True
    (seen,) = result
    if isinstance(seen, Seen):
        return finding("passed", seen.text, seen.figures), False
    if isinstance(seen, NotHere):
        return finding("not run", str(seen)), False
    if isinstance(seen, CheckFailed):
        return finding("failed", str(seen)), False
    text = f"{type(seen).__name__}: {seen}. Nobody has foreseen this: open an issue with the JSON, by {_TEMPLATE}"
    return finding("failed", text, {"traceback": traceback.format_exception(seen)}), False


def _run(check: Check, machine: CheckedMachine, result: list[Seen | BaseException]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they warn of is what the checks look for
            seen = check.run(machine)
            machine.synchronize()
        result.append(seen)
    except BaseException as error:
        result.append(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


def main(arguments: Sequence[str]) -> None:
    """``python -m dataparallel --check``. Ends the process: with 0 if all is right, with 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m dataparallel --check",
        description="Checks that this machine computes with the library what one device computes, and how fast.",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"when to end (default: {SECONDS:.0f})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON, for an issue")
    options = parser.parse_args(arguments)
    if not 0 < options.seconds < math.inf:
        parser.error(f"--seconds has to be above 0; got {options.seconds}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.absolute().parent}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the report is written all the same
    code = 1
    with _Lines(len(CHECKS)) as lines:
        machine, report = _begin(options.seconds)
        for name, text in report.machine.items():
            lines.show(f"{name:<13} {text}", is_check=False)
        try:
            _make_all(CHECKS, machine, report, lines.show)
            code = int(not report.passed)
        except KeyboardInterrupt:
            code = 130
    print(f"\n{report.conclusion()}")
    if options.json is not None:
        options.json.write_text(report.to_json() + "\n", encoding="utf-8")
        print(f"The report is in {options.json}.")
    elif code:
        print("For an issue, run it again with --json FILE.")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a check that hangs must not keep the process


class _Lines:
    """Prints lines, on a terminal above a progress bar if tqdm is installed."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, leave=False, unit="check")

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, line: str, is_check: bool = True) -> None:
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.write(line)
            self._bar.update(int(is_check))
