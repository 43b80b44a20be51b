"""A report is a list of `Section`: facts, tables and pictures. `as_text` prints it; ``report_page`` makes a page of it.

``report`` finds out what to say about the machine, ``dataparallel.testing.model_report`` about a model. This file knows
neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dataparallel.tracing.intervals import Interval
from dataparallel.tracing.table import aligned


@dataclass(frozen=True)
class Facts:
    """Pairs: a name and what was found. A name that begins with spaces belongs to the one above it.

    ``kind``: "figures" are the few that a reader should see first, "code" is for commands.
    """

    rows: Sequence[tuple[str, str]]
    kind: Literal["", "figures", "code"] = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells. The columns ``words`` are text, the others figures. A page shows a detail when it is opened."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    is_detail: bool = False


@dataclass(frozen=True)
class Links:
    """A picture of devices and what joins them. Text does not show it.

    Attributes:
        devices: for each its name, and lines about it.
        ways: for pairs of positions in ``devices`` that are joined, what joins them; the copies of other pairs go
            through the host. ``None`` if it is not known.
    """

    devices: Sequence[tuple[str, Sequence[str]]]
    ways: Mapping[tuple[int, int], str] | None


Lane: TypeAlias = "Mapping[str, Sequence[Interval]]"
"""For each kind of work when it is done, in seconds."""


@dataclass(frozen=True)
class Timeline:
    """A picture of what each row does when, for so many seconds. The lanes of a row have a name of their own each.

    Text does not show it.
    """

    title: str
    seconds: float
    rows: Sequence[tuple[str, Sequence[Lane]]]


Part: TypeAlias = Facts | Table | Links | Timeline | str
"""A string is a paragraph."""


@dataclass(frozen=True)
class Section:
    """Parts under a title. The first section of a report has none."""

    title: str
    parts: Sequence[Part]


def as_text(sections: Sequence[Section]) -> str:
    """The report for a terminal."""
    lines = [[*_lines(section)] for section in sections]
    # A section with nothing but pictures has no text, and its title would stand alone.
    return "\n\n".join("\n".join(own) for section, own in zip(sections, lines, strict=True) if own != [section.title])


def _lines(section: Section) -> Iterator[str]:
    indent = "  " if section.title else ""
    if section.title:
        yield section.title
    for part in section.parts:
        if isinstance(part, str):
            yield f"{indent}{part}"
        elif isinstance(part, Facts):
            width = 2 + max((len(name) for name, _ in part.rows), default=0)
            yield from (f"{indent}{name:<{width}}{text}" for name, text in part.rows)
        elif isinstance(part, Table):
            lines = aligned([part.head, *part.rows], part.words).splitlines()
            yield from ("", f"{indent}{part.title}", *(f"{indent}{line}" for line in lines))
