"""`CheckReport`: what the checks of a machine have found, as text, as JSON and as a table of a notebook."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Literal

Status = Literal["passed", "failed", "not run", "no time"]

_SIGNS: Mapping[Status, str] = {"passed": "ok", "failed": "FAILED", "not run": "-", "no time": "-"}

SPEED = "speed"
"""The group of what is measured and cannot be wrong."""


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes:
        group, name: what was checked.
        status: "not run" if the check needs what this machine has not got, "no time" if the time was over.
        seconds: how long it took.
        text: what was seen; of a check that has failed, a sentence that says what to do.
        figures: numbers that were measured, for the JSON.
    """

    group: str
    name: str
    status: Status
    seconds: float
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The finding as a line of text."""
        return f"{_SIGNS[self.status]:<7}{self.seconds:6.1f} s  {self.group + ': ' + self.name:<44}  {self.text}"


@dataclass
class CheckReport:
    """The findings of all checks of a machine, in the order in which they were made.

    Attributes:
        machine: devices and versions, by name.
        devices: how many accelerators there are.
        date: of the check.
        findings: one for each check.
        shows_little: why the result says little about GPUs; empty if it does say much.
    """

    machine: dict[str, str]
    devices: int = 0
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    findings: list[Finding] = field(default_factory=list)
    shows_little: str = ""

    @property
    def passed(self) -> bool:
        """True if no check has failed, and for none there was no time, except to measure."""
        missing = any(each.status == "no time" and each.group != SPEED for each in self.findings)
        return not missing and not any(each.status == "failed" for each in self.findings)

    def conclusion(self) -> str:
        """One paragraph: whether all is right, and what to do if it is not."""
        count = {status: [f for f in self.findings if f.status == status] for status in _SIGNS}
        text = (
            ", ".join(f"{len(found)} {status}" for status, found in count.items() if found or status == "failed") + "."
        )
        if count["failed"]:
            text += " Failed: " + "; ".join(f"{each.group}: {each.name}" for each in count["failed"]) + "."
        if count["no time"]:
            text += " Pass more --seconds for what had no time."
        return f"{text} {self.shows_little}".strip()

    def to_json(self) -> str:
        """The whole report, as JSON with an indent of two."""
        return json.dumps({**asdict(self), "passed": self.passed}, indent=2)

    def __str__(self) -> str:
        machine = [f"{name:<13} {value}" for name, value in self.machine.items()]
        return "\n".join([*machine, "", *(finding.line() for finding in self.findings), "", self.conclusion()])

    def __repr__(self) -> str:
        return f"<CheckReport: {self.conclusion()}>"

    def _repr_html_(self) -> str:
        def row(*cells: str, kind: str = "td", color: str = "inherit") -> str:
            style = f"text-align: left; color: {color}"
            return "<tr>" + "".join(f"<{kind} style='{style}'>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"

        machine = "".join(row(name, value) for name, value in self.machine.items())
        findings = "".join(
            row(
                *(_SIGNS[one.status], f"{one.seconds:.1f} s", one.group, one.name, one.text),
                color="crimson" if one.status == "failed" else "inherit",
            )
            for one in self.findings
        )
        head = row("result", "time", "of", "check", "what was seen", kind="th")
        return f"<p>{escape(self.conclusion())}</p><table>{machine}</table><table>{head}{findings}</table>"
