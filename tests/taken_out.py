"""What runs in the place of a guard that ``guards.py`` has taken out, and the pytest plugin that notes what tests do.

Changed copies of the package call `nothing`, `blank` and `note`. Nobody else does.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_LOG = os.environ.get("GUARDS_LOG")
_seen: set[tuple[str, str]] = set()


def nothing(*_: object) -> None:
    """Does nothing, in place of a wait; receiver and arguments have been evaluated."""


def blank(event: Any) -> Any:
    """The event, or what holds events, as if nothing had been recorded: nobody waits for it."""
    if isinstance(event, torch.Event):
        return torch.Event(event.device)
    if event is None or (not hasattr(event, "__dict__") and not hasattr(event, "_events")):
        return type(event)()  # a backend's event
    if hasattr(event, "_event"):
        inner = event._event
        event._event = inner if inner is None else blank(inner)
    elif hasattr(event, "_events"):
        event._events = []
    else:
        return type(event)()
    return event


def streams_joined(streams: Any) -> Any:
    """Makes the streams current, and orders nothing."""
    from dataparallel.comm.streams.current import streams_set

    return streams_set(streams)


def forward_streams_set(node: Any, grads: Any) -> Any:
    """Makes the streams of the node's forward current, and orders nothing."""
    from dataparallel.comm.streams.current import streams_set

    return streams_set(node.streams)


def note(guard: str) -> None:
    """Notes that the running test has come to a guard."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (guard, test) not in _seen:
        _seen.add((guard, test))
        _write("reached", guard, test)


def pytest_runtest_logreport(report: Any) -> None:
    """Notes how a test ended, with the last line of its error."""
    words = " ".join(str(report.longrepr).split()) if report.failed else ""
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", None)
    if report.failed and crash:
        words = " ".join(crash.split())
    if report.when == "call" or report.outcome != "passed":
        _write("ended", report.nodeid, report.outcome, f"{report.duration:.3f}", words[:600])
    else:
        _write("ended", report.nodeid, "passed", f"{report.duration:.3f}", "")


def _write(what: str, *fields: str) -> None:
    if _LOG:
        with open(os.path.join(_LOG, f"{what}_{os.getpid()}"), "a") as file:
            file.write("\t".join(fields) + "\n")
