"""`CheckReport`: what the checks of a machine have found, as text, as JSON and as a table of a notebook."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Literal

Status = Literal["passed", "failed", "not run"]

_SIGNS: Mapping[Status, str] = {"passed": "ok", "failed": "FAILED", "not run": "-"}


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes:
        group, name: what was checked.
        status: "not run" if the check needs what this machine has not got, or there was no time.
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
        return f"{_SIGNS[self.status]:<7}{self.seconds:6.1f} s  {self.group + ': ' + self.name:<34}  {self.text}"


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
        """True if no check has failed."""
        return not any(finding.status == "failed" for finding in self.findings)

    def conclusion(self) -> str:
        """One paragraph: whether all is right, and what to do if it is not."""
        count = {status: [f for f in self.findings if f.status == status] for status in _SIGNS}
        text = f"{len(count['passed'])} checks passed, {len(count['failed'])} failed, {len(count['not run'])} not run."
        if count["failed"]:
            text += " Failed: " + "; ".join(f"{each.group}: {each.name}" for each in count["failed"]) + "."
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
        def row(*cells: str) -> str:
            return "<tr>" + "".join(f"<td style='text-align: left'>{escape(cell)}</td>" for cell in cells) + "</tr>"

        machine = "".join(row(name, value) for name, value in self.machine.items())
        findings = "".join(
            row(_SIGNS[each.status], f"{each.seconds:.1f} s", each.group, each.name, each.text)
            for each in self.findings
        )
        return f"<table>{machine}</table><table>{findings}</table><p>{escape(self.conclusion())}</p>"
